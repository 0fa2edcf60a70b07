"""Connections: slow, idle and many clients, half-closed ones, requests without a certain end."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import Execution
from lmcore_serve import server as server_module
from lmcore_serve.http import connection as connection_module
from lmcore_serve.http.connection import Acceptor
from lmcore_serve.http.log_limit import Allowance, RepeatFilter, limited_logs
from lmcore_serve.server import allowed_connections
from lmcore_serve.state import Limits

from .conftest import Server, running_server

PATH = "/v1/completions"
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Half: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"


def connect(server: Server, timeout: float = 20) -> socket.socket:
    """Open a connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout)


def request(body: object, *, version: str = "1.1", headers: str = "") -> bytes:
    """Return the bytes of a request for completions."""
    raw = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def whole(connection: socket.socket) -> bytes:
    """Return all bytes until the end of a connection."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


@contextmanager
def open_connections(server: Server, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that send something."""
    with ExitStack() as stack:
        made = [stack.enter_context(connect(server)) for _ in range(count)]
        for one in made:
            one.sendall(sent)
        yield made


def is_ended(connection: socket.socket) -> bool:
    """Return True when the server has ended a connection."""
    with suppress(ConnectionError):
        whole(connection)
    return True


def send_until_the_end(connection: socket.socket, data: bytes, pause: float) -> None:
    """Send something again and again, until the server ends the connection."""
    end = time.monotonic() + 20
    with suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(data)
            time.sleep(pause)
        raise AssertionError("the server has not ended the connection")


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, b"\r\n"], ids=["nothing", "half", "a line"])
def test_clients_without_a_request(loaded: LoadedModel, sent: bytes) -> None:
    """Their connections end after the time for a head."""
    with running_server(loaded, limits=Limits(head_seconds=0.3)) as server:
        with open_connections(server, 3, sent) as made:
            assert all(is_ended(one) for one in made)
        assert server.ask("/health").status == 200


def test_a_head_byte_by_byte(loaded: LoadedModel) -> None:
    """Each byte gives no further time."""
    with running_server(loaded, limits=Limits(head_seconds=0.5)) as server, connect(server) as one:
        one.sendall(HALF_HEAD)
        send_until_the_end(one, b"x", 0.02)


def test_an_idle_connection(loaded: LoadedModel) -> None:
    """It ends some time after a reply, also if half a head follows."""
    idle = ((Limits(head_seconds=60), b""), (Limits(head_seconds=0.5), HALF_HEAD))
    for limits, follows in idle:
        with running_server(loaded, limits=limits) as server, connect(server) as one:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert one.recv(5000).startswith(b"HTTP/1.1 200 ")
            one.sendall(follows)
            assert is_ended(one)


def test_a_refused_body_that_goes_on(loaded: LoadedModel) -> None:
    """The rest of a body that was refused does not keep a connection."""
    limits = Limits(head_seconds=0.5, max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running_server(loaded, limits=limits) as server, connect(server) as one:
        one.sendall(head)
        send_until_the_end(one, b"400\r\n" + b" " * 1024 + b"\r\n", 0.02)


def test_a_reply_that_nobody_reads(loaded: LoadedModel) -> None:
    """Its connection ends, and with it what is generated."""
    with (
        running_server(loaded, limits=Limits(unread_seconds=0.5)) as server,
        socket.socket() as one,
    ):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(20)
        one.connect(("127.0.0.1", server.port))
        send_until_the_end(one, b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 20, 0.001)


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "head", "body"])
def test_more_connections_than_there_may_be(loaded: LoadedModel, sent: bytes) -> None:
    """Clients that wait make room for new ones, the longest waiting first."""
    with (
        running_server(loaded, limits=Limits(max_connections=8)) as server,
        open_connections(server, 20, sent) as made,
    ):
        for _ in range(3):
            assert server.ask("/health").status == 200
        assert all(is_ended(one) for one in made[:12])
        made[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            made[-1].recv(100)


def test_running_requests_keep_their_connections(loaded: LoadedModel) -> None:
    """A new client gets status 503 while every connection has a running request."""
    ends = threading.Event()

    class Waiting(nullcontext[None]):
        def __enter__(self) -> None:
            ends.wait(20)

    held = dataclasses.replace(loaded, execution=Execution(Waiting))
    limits = Limits(max_connections=8)
    with running_server(held, limits=limits, max_waiting=20) as server:
        sent = request({"prompt": "a", "max_tokens": 1})
        with open_connections(server, 8, sent) as made:
            service = server.models["tiny"].service
            while service.num_running + service.num_waiting < 8:
                time.sleep(0.001)
            with connect(server) as one:
                reply = whole(one)
            ends.set()
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert all(one.recv(5000).startswith(b"HTTP/1.1 200 ") for one in made)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_side(server: Server, version: str, stream: bool) -> None:
    """It gets the reply of its request, and the connection ends."""
    body = {"prompt": "a", "max_tokens": 9, "temperature": 0, "stream": stream}
    with connect(server) as one:
        one.sendall(request(body, version=version))
        one.shutdown(socket.SHUT_WR)
        reply = whole(one)
    while reply.startswith(b"HTTP/1.1 100 "):  # which every client of HTTP/1.1 takes
        assert version == "1.1"
        reply = reply.partition(b"\r\n\r\n")[2]
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.rstrip(b"\r\n0").endswith(b"[DONE]" if stream else b"}")


def test_pipelined_requests_of_a_client_that_ends_its_side(server: Server) -> None:
    """Each gets its reply."""
    with connect(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        one.shutdown(socket.SHUT_WR)
        assert whole(one).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("sent", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
def test_a_client_that_ends_its_side_too_soon(server: Server, sent: bytes) -> None:
    """There is nothing to reply to: the connection ends at once."""
    with connect(server) as one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        assert whole(one) == b""


@pytest.mark.parametrize("order", ["both", "reversed"])
def test_two_lengths_of_a_body(server: Server, order: str) -> None:
    """A proxy may see another end of the request: it is refused, and the connection ends."""
    names = ["Transfer-Encoding: chunked\r\n", "Content-Length: 5\r\n"]
    lengths = "".join(names if order == "both" else names[::-1])
    smuggled = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    with connect(server) as one:
        one.sendall(f"POST {PATH} HTTP/1.1\r\nHost: a\r\n{lengths}\r\n0\r\n\r\n{smuggled}".encode())
        reply = whole(one)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b"exclude each other" in reply


def test_a_large_head(server: Server) -> None:
    """A head beyond the limit is refused."""
    with connect(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 200 ")
    with connect(server) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000)
        assert one.recv(100).startswith(b"HTTP/1.1 400 ")


def test_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their limit is raised as far as possible; what is missing is missing in connections."""
    found = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _which: found["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: found.update(now=new))
    assert allowed_connections(512) == 512
    assert found["now"] == (1024, 4096)
    assert allowed_connections(2000) == 2000
    assert found["now"][0] >= 2000
    assert not caplog.records
    allowed = allowed_connections(5000)
    assert 3000 < allowed < 4096
    assert "`ulimit -n` is 4096" in caplog.text
    assert allowed + server_module._OTHER_FILES == found["now"][0]


def test_the_access_log_is_limited(loaded: LoadedModel) -> None:
    """Requests that reach no model cost nothing: of many, some are logged, with the others' number.

    The work of a model is logged each time.
    """
    with running_server(loaded) as server, connect(server) as one:
        one.sendall(b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n" * 600)
        one.shutdown(socket.SHUT_WR)
        assert whole(one).count(b"HTTP/1.1 404 ") == 600
        for _ in range(5):
            server.ask(PATH, {"prompt": "a", "max_tokens": 1})
        assert server.ask("/metrics").status == 200
    log = [json.loads(line) for line in server.log]
    assert 200 <= len(log) < 600
    assert sum(one["path"] == PATH for one in log) == 5


def test_an_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some lines at once, then some each second; the next one knows how many were omitted."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = Allowance(3, 0.5)
    assert [allowance.take() for _ in range(6)] == [0, 0, 0, None, None, None]
    now[0] = 2
    assert [allowance.take() for _ in range(2)] == [3, None]
    now[0] = 100
    assert [allowance.take() for _ in range(4)] == [1, 0, 0, None]


def test_repeated_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that an attack repeats is logged some times, then with its number."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = RepeatFilter()

    def record(text: str, *args: object) -> logging.LogRecord:
        return logging.LogRecord("a", logging.ERROR, "", 1, text, args, None)

    assert sum(found.filter(record("of %d", number)) for number in range(1000)) == 5
    assert found.filter(record("another"))
    now[0] = 10
    last = record("of %d", 7)
    assert found.filter(last)
    assert last.getMessage() == "of 7 (995 more like it were not logged)"


def test_the_libraries_log_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Messages of the event loop about file descriptors, and of uvicorn, are limited."""
    with limited_logs():
        for name in ("asyncio", "uvicorn.error"):
            for _ in range(100):
                logging.getLogger(name).error("socket.accept() out of system resource\nsocket: 5")
    assert len(caplog.records) == 10
    logging.getLogger("asyncio").error("as before")
    assert caplog.records[-1].message == "as before"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not tell the queue")
def test_a_flood_of_connections_waits_in_the_queue() -> None:
    """The system keeps thousands: it would leave one more without an answer for a second."""
    sock = server_module.listen("127.0.0.1", 0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    async def queue() -> int:
        config = server_module.configuration(app, Limits())
        config.load()
        server = server_module._Server(config, [], 1.0)
        server.lifespan = config.lifespan_class(config)
        await server.startup([sock])
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        await server.shutdown([sock])
        (most,) = struct.unpack_from("I", info, 28)  # of a listening socket: `tcpi_sacked`
        return int(most)

    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="utf-8"))
    assert asyncio.run(queue()) == min(4096, allowed)


def test_a_whole_request_goes_before_slow_ones() -> None:
    """In a flood, a client whose request has come waits for none of the slow ones before it."""
    begun: list[bytes] = []
    complete = asyncio.Event()

    class Begun(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            begun.append(data)
            if len(begun) == 301:
                complete.set()

    async def flood() -> None:
        listening = server_module.listen("127.0.0.1", 0)
        with ExitStack() as stack:
            for sent in [HALF_HEAD] * 300 + [b"GET / HTTP/1.1\r\n\r\n"]:
                one = stack.enter_context(socket.create_connection(listening.getsockname()))
                one.sendall(sent)
            acceptor = Acceptor(listening, Begun, 400)
            await complete.wait()
            acceptor.close()
        listening.close()

    asyncio.run(asyncio.wait_for(flood(), 30))
    assert begun.index(b"GET / HTTP/1.1\r\n\r\n") < 100


def test_connections_that_wait_for_their_begin_are_bounded() -> None:
    """Others than the bound allows stay in the system's queue, and begin in their turn."""
    most = 0

    async def flood() -> None:
        nonlocal most
        listening = server_module.listen("127.0.0.1", 0)
        begun = 0

        def begin() -> asyncio.Protocol:
            nonlocal begun
            begun += 1
            return asyncio.Protocol()

        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(listening.getsockname()))
            acceptor = Acceptor(listening, begin, 20)
            while begun < 100:
                most = max(most, len(acceptor._waiting))
                await asyncio.sleep(0)
            acceptor.close()
        listening.close()

    asyncio.run(asyncio.wait_for(flood(), 30))
    assert 0 < most <= 20


def test_accepting_goes_on_after_a_want_of_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a file descriptor for a connection the server says so once, and tries again."""
    monkeypatch.setattr(connection_module, "_ACCEPT_AGAIN_SECONDS", 0.05)

    class Listening(socket.socket):
        refused = 2

        def accept(self) -> tuple[socket.socket, Any]:
            if self.refused:
                self.refused -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def accept() -> None:
        listening = Listening()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        begun = asyncio.Event()

        class Begun(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                begun.set()

        with socket.create_connection(listening.getsockname()):
            acceptor = Acceptor(listening, Begun, 8)
            await begun.wait()
            acceptor.close()
        listening.close()

    asyncio.run(asyncio.wait_for(accept(), 30))
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: Too many open files"
    ] * 2
