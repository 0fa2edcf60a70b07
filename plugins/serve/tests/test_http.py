"""Limits, keys, slow and leaving clients, the access log, metrics, and the page."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import Execution
from lmcore_serve.state import Limits

from .conftest import Server, running_server

PATH = "/v1/completions"


@pytest.fixture
def slow_model(loaded: LoadedModel) -> LoadedModel:
    """A model that takes 20 ms a pass."""

    class Pause(nullcontext[None]):
        def __enter__(self) -> None:
            time.sleep(0.02)

    return dataclasses.replace(loaded, execution=Execution(Pause))


@pytest.fixture
def guarded(loaded: LoadedModel) -> Iterator[Server]:
    """A server with keys, names and small limits."""
    limits = Limits(max_body_bytes=1000, body_seconds=0.5)
    with running_server(
        loaded, limits=limits, keys=["first", "second"], hosts={"127.0.0.1", "models.test"}
    ) as made:
        yield made


def wait_until_idle(server: Server) -> None:
    """Wait until no text is generated."""
    service = server.models["tiny"].service
    end = time.monotonic() + 10
    while service.num_running or service.num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_keys(guarded: Server) -> None:
    """Every known key is accepted; the page and the state of health need none."""
    body = {"prompt": "a", "max_tokens": 1}
    for header, status in (
        ({}, 401),
        ({"Authorization": "Bearer third"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
    ):
        reply = guarded.ask(PATH, body, headers=header)
        assert reply.status == status
    refused = guarded.ask("/metrics")
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/page/page.js"):
        assert guarded.ask(path).status == 200


@pytest.mark.parametrize(
    "host, status",
    [("127.0.0.1:80", 200), ("Models.test", 200), ("evil.test", 403), ("", 403)],
)
def test_names_of_the_server(guarded: Server, host: str, status: int) -> None:
    """A page whose name was made to lead here cannot read answers."""
    assert guarded.ask("/health", headers={"Host": host}).status == status


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies(guarded: Server, announced: bool) -> None:
    """A body over the limit is refused, whether its length is announced or not."""
    key = {"Authorization": "Bearer first"}
    body = json.dumps({"prompt": "a" * 2000}).encode()
    if announced:
        reply = guarded.ask(PATH, body, headers=key)
        assert reply.status == 413
        assert "1000 bytes" in reply.message
        return
    connection = guarded.connect()
    chunks = (body[at : at + 100] for at in range(0, len(body), 100))
    headers = {**key, "Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    connection.request("POST", PATH, chunks, headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    response.read()
    connection.close()


def test_slow_bodies(guarded: Server) -> None:
    """A client that stops within the body gets an answer, and its connection ends."""
    with socket.create_connection(("127.0.0.1", guarded.port), 10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer first\r\n"
            b'Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"prompt"'
        )
        reply = connection.recv(1000)
    assert reply.startswith(b"HTTP/1.1 408 ")


def test_a_broken_request(server: Server) -> None:
    """Bytes that are not HTTP are answered by 400."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert server.ask("/health").status == 200


def test_a_full_queue_and_a_deadline(slow_model: LoadedModel) -> None:
    """The queue answers 429 with a time to wait, a deadline 503."""
    limits = Limits(request_seconds=0.5)
    with running_server(slow_model, limits=limits, max_running=1, max_waiting=0) as server:
        connection = server.connect()
        body = json.dumps({"prompt": "a", "max_tokens": 80, "temperature": 0})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        while not server.models["tiny"].service.num_running:
            time.sleep(0.01)
        full = server.ask(PATH, {"prompt": "a", "max_tokens": 1})
        assert full.status == 429
        assert full.headers["retry-after"] == "1"
        assert full.json["error"]["type"] == "rate_limit_error"
        late = connection.getresponse()
        assert late.status == 503
        assert "0.5 seconds" in late.read().decode()
        connection.close()
        wait_until_idle(server)
        assert server.ask(PATH, {"prompt": "a", "max_tokens": 1}).status == 200


def test_a_deadline_within_a_stream(slow_model: LoadedModel) -> None:
    """The status has been sent: the error is an event."""
    with running_server(slow_model, limits=Limits(request_seconds=0.5)) as server:
        body = {"prompt": "a", "max_tokens": 80, "temperature": 0, "stream": True}
        events = server.ask(PATH, body).events
    assert len(events) > 1
    assert events[-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(slow_model: LoadedModel, stream: bool) -> None:
    """Its text is not generated further."""
    with running_server(slow_model) as server:
        connection = server.connect()
        body = json.dumps({"prompt": "a", "max_tokens": 90, "temperature": 0, "stream": stream})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        service = server.models["tiny"].service
        if stream:
            connection.getresponse().read(10)
        while not service.num_running:
            time.sleep(0.01)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        begin = time.monotonic()
        wait_until_idle(server)
        assert time.monotonic() - begin < 1.5
        assert service.statistics.ended == {"cancelled": 1}


def test_the_access_log(loaded: LoadedModel) -> None:
    """A JSON object for each request, with numbers and without texts."""
    with running_server(loaded) as server:
        reply = server.ask(PATH, {"prompt": "secret", "max_tokens": 3, "temperature": 0})
        server.ask("/nothing")
    # A line is written after the reply: the server has ended here.
    log = [json.loads(line) for line in server.log]
    assert log[0]["id"] == reply.headers["x-request-id"]
    assert (log[0]["method"], log[0]["path"], log[0]["status"]) == ("POST", PATH, 200)
    assert (log[0]["prompt_tokens"], log[0]["generated_tokens"]) == (6, 3)
    assert log[0]["model"] == "tiny"
    assert log[0]["client"] == "127.0.0.1"
    assert log[1]["status"] == 404
    assert not any("secret" in line for line in server.log)


def test_metrics(loaded: LoadedModel) -> None:
    """Prometheus can read the numbers, of refused bodies too; unknown paths share a name."""
    with running_server(loaded, limits=Limits(max_body_bytes=1000)) as server:
        server.ask(PATH, {"prompt": "abc", "max_tokens": 4, "temperature": 0})
        for number in range(3):
            server.ask(f"/nothing/{number}")
        assert server.ask(PATH, b" " * 2000).status == 413
        reply = server.ask("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    from prometheus_client.parser import text_string_to_metric_families

    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }
    assert found["lmcore_generated_tokens_total", "tiny"] == 4
    assert found["lmcore_prompt_tokens_total", "tiny"] == 3
    assert found["lmcore_texts_total", "length", "tiny"] == 1
    assert found["lmcore_requests_total", *sorted(["200", "POST", PATH])] == 1
    assert found["lmcore_requests_total", *sorted(["413", "POST", PATH])] == 1
    assert found["lmcore_requests_total", *sorted(["404", "GET", "other"])] == 3


def test_health(loaded: LoadedModel) -> None:
    """It fails when the thread of generation has ended."""
    with running_server(loaded) as server:
        assert server.ask("/health").json["status"] == "ok"
        head = server.ask("/health", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        server.models["tiny"].service.close(5)
        reply = server.ask("/health")
        assert (reply.status, reply.json["status"]) == (503, "failed")
        assert server.ask(PATH, {"prompt": "a"}).status == 503


def test_models(server: Server) -> None:
    """They are listed and described; an unknown one is not found."""
    (found,) = server.ask("/v1/models").json["data"]
    assert found["id"] == "tiny"
    assert server.ask("/v1/models/tiny").json == found
    assert server.ask("/v1/models/other").status == 404


def test_a_name_with_a_slash(loaded: LoadedModel) -> None:
    """A model with a slash in its name, as on a hub, is described, too."""
    with running_server(loaded, others={"group/other": loaded}) as server:
        for path in ("/v1/models/group/other", "/v1/models/group%2Fother"):
            assert server.ask(path).json["id"] == "group/other"


def test_two_models(loaded: LoadedModel) -> None:
    """A request names one of them."""
    from .conftest import new_loaded

    with running_server(loaded, others={"other": new_loaded(8)}) as server:
        texts = {
            name: server.ask(
                PATH, {"model": name, "prompt": "a", "max_tokens": 9, "temperature": 0}
            ).json["choices"][0]["text"]
            for name in ("tiny", "other")
        }
    assert texts["tiny"] != texts["other"]


@pytest.mark.parametrize(
    "method, path, status, problem",
    [
        ("POST", "/completions", 404, "there is no path `/completions`; `/v1/completions`"),
        ("POST", "/v1/completions/", 404, "there is no path `/v1/completions/`"),
        ("POST", "/v1/completion", 404, "there is no path `/v1/completion`"),
        ("GET", "/page/none.js", 404, "there is no path `/page/none.js`"),
        ("POST", "/api", 405, "`/api` takes PUT"),
        ("GET", "/v1/chat/completions", 405, "`/v1/chat/completions` takes POST"),
    ],
)
def test_wrong_paths(server: Server, method: str, path: str, status: int, problem: str) -> None:
    """The error about a wrong path names the right ones."""
    reply = server.ask(path, {}, method=method)
    assert reply.status == status
    assert reply.message.startswith(problem)


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    """Every file that it names is there, and a browser loads nothing else."""
    page = server.ask("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    text = page.body.decode()
    links = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert len(links) == 3
    for link in links:
        assert server.ask(link).status == 200
    script = server.ask("/page/page.js").body.decode()
    named = set(re.findall(r'\$\("([\w-]+)"\)', script)) | set(
        re.findall(r'number\("([\w-]+)"\)', script)
    )
    assert named
    assert named <= set(re.findall(r'id="([\w-]+)"', text))


def test_an_internal_error(loaded: LoadedModel) -> None:
    """The reply reveals no details of the error, and the server keeps running."""

    def broken(_text: str) -> list[int]:
        raise RuntimeError("inner secret")

    tokenizer = loaded.tokenizer
    with pytest.MonkeyPatch.context() as patch, running_server(loaded) as server:
        patch.setattr(type(tokenizer), "encode", lambda self, text: broken(text))
        reply = server.ask(PATH, {"prompt": "a"})
        assert reply.status == 500
        assert "inner" not in reply.message
        patch.undo()
        assert server.ask(PATH, {"prompt": "a"}).status == 200
