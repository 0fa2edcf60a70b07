"""`Client`: answers of this server, of Megatron-LM's, and of what is none."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.inference.load import LoadedModel
from lmcore_serve.client import Client, ClientError

from .conftest import Server, running_server


@contextmanager
def other_server(
    status: int, body: bytes, path: str = "/api", headers: Mapping[str, str] | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Run a server with one path, which answers the same to every request."""
    requests: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers["Content-Length"])
            requests.append((self.command, self.path, json.loads(self.rfile.read(size))))
            known = self.path == path
            self.send_response(status if known else 404)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if known else b"nothing here")

        do_PUT = do_POST = answer

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_address[1]}", requests
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_a_stream(server: Server) -> None:
    """The parts are the text that the server replies as a whole."""
    settings = {"max_tokens": 9, "seed": 5}
    parts, ends = [], []

    def continued() -> Iterator[str]:
        ends.append((yield from Client(f"127.0.0.1:{server.port}").complete("Hello", settings)))

    parts += continued()
    assert ends == ["length"]
    whole = server.ask("/v1/completions", {"prompt": "Hello", **settings}).json
    assert "".join(parts) == whole["choices"][0]["text"]
    assert len(parts) > 1


def test_megatrons_server() -> None:
    """A server with `/api` only is asked there; the prompt is not part of the answer."""
    body = json.dumps({"text": ["Hello world"], "segments": [], "logprobs": None}).encode()
    with other_server(200, body) as (address, requests):
        settings = {"max_tokens": 9, "seed": 5, "temperature": 0.0}
        parts = list(Client(f"http://{address}/api").complete("Hello", settings))
    assert parts == [" world"]
    assert requests[1] == (
        "PUT",
        "/api",
        {
            "prompts": ["Hello"],
            "tokens_to_generate": 9,
            "random_seed": 5,
            "temperature": 1.0,
            "top_k": 1,
        },
    )


@pytest.mark.parametrize(
    "status, body, problem",
    [
        (200, b'"Empty prompts require add_BOS=true"', "add_BOS"),
        (400, b'"prompts is empty"', "prompts is empty"),
        (500, b"broken", "broken"),
        (200, b"{", "not JSON"),
        (200, b"[" * 100_000, "not JSON"),
    ],
)
def test_errors_of_megatrons_server(status: int, body: bytes, problem: str) -> None:
    """An error with the status 200 is one, too."""
    with other_server(status, body) as (address, _), pytest.raises(ClientError, match=problem):
        list(Client(address).complete("Hello", {}))


@pytest.mark.parametrize(
    "status, path, kind, why",
    [
        (200, "/v1/completions", "text/html; charset=utf-8", "the status 200, text/html"),
        (501, "/v1/completions", "text/html", "the status 501, text/html"),
        (403, "/v1/completions", "text/html", "the status 403, text/html"),
        (200, "/api", "text/html", "the status 200, text/html"),
        (404, "/nothing", "text/plain", "the status 404, text/plain"),
        (307, "/v1/completions", "", "the status 307, a redirect to https://other"),
        (200, "/v1/completions", "text/event-stream", "the status 200, text/event-stream"),
    ],
)
def test_another_kind_of_server(status: int, path: str, kind: str, why: str) -> None:
    """The error says so in one line, without the page that came."""
    headers = {"Content-Type": kind} if kind else {"Location": "https://other"}
    body = b"data: [1]\n\n<html>\n<p>long</p>\n"
    with other_server(status, body, path, headers) as (address, _):
        with pytest.raises(ClientError, match="is not a server of lmcore or Megatron") as caught:
            list(Client(address).complete("Hello", {}))
        assert str(caught.value.why).endswith(why)


def test_a_page_of_an_error() -> None:
    """A proxy, or Megatron-LM's server, that fails: its status, not its page."""
    page = {"Content-Type": "text/html"}
    with other_server(502, b"<html>", headers=page) as (address, _):
        with pytest.raises(ClientError) as caught:
            list(Client(address).complete("Hello", {}))
        assert caught.value.why == "status 502 Bad Gateway"


def test_refused(server: Server) -> None:
    """The message of the server is shown."""
    client = Client(f"127.0.0.1:{server.port}")
    with pytest.raises(ClientError, match="96 positions"):
        list(client.complete("a" * 97, {}))
    with pytest.raises(ClientError, match="there is no model `b`"):
        list(client.complete("a", {"model": "b"}))
    with pytest.raises(ClientError, match="no chat template"):
        list(client.chat([{"role": "user", "content": "Hi"}], {}))


def test_keys(loaded: LoadedModel) -> None:
    """The key is sent; without one the hint names the flag."""
    with running_server(loaded, keys=["mine"]) as server:
        address = f"127.0.0.1:{server.port}"
        assert list(Client(address, "mine").complete("a", {"max_tokens": 1}))
        with pytest.raises(ClientError, match="--api-key-file"):
            list(Client(address).complete("a", {"max_tokens": 1}))


def test_nobody_there() -> None:
    """A port without a server, and a server that closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ClientError, match="no answer from http://127"):
        list(Client(f"127.0.0.1:{port}").complete("a", {}))
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def hang_up() -> None:
            silent.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ClientError, match="no answer"):
            list(Client(f"127.0.0.1:{silent.getsockname()[1]}").complete("a", {}))
        thread.join()


@pytest.mark.parametrize("address", ["", "ftp://host", "http://", "host:port", "a:99999", "[::1"])
def test_no_address(address: str) -> None:
    """The error says how an address is written."""
    with pytest.raises(ConfigError, match="localhost:5000"):
        Client(address)
