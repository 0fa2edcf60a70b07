"""The end of a server with requests that run: each gets an honest reply, and the log is true."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import uvicorn

from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import Execution
from lmcore_serve import server as server_module
from lmcore_serve.app import create_app
from lmcore_serve.served_model import ServedModel
from lmcore_serve.server import _Server, configuration, listen
from lmcore_serve.service import Service
from lmcore_serve.state import Limits, ServerState

from .conftest import Reply

GREEDY = {"max_tokens": 90, "temperature": 0}
REQUESTS = {
    "whole": ("POST", "/v1/completions", {"prompt": "a", **GREEDY}),
    "stream": ("POST", "/v1/completions", {"prompt": "a", **GREEDY, "stream": True}),
    "plain": ("PUT", "/api", {"prompts": ["a"], "tokens_to_generate": 90, "top_k": 1}),
    "beams": ("PUT", "/api", {"prompts": ["a"], "tokens_to_generate": 90, "beam_width": 2}),
}


@dataclasses.dataclass
class Stopping:
    """A server that signals can be sent to.

    Attributes:
        port: Port that it listens on.
        service: Service of its model.
        log: Lines of the access log.
        signal: Function that does what a signal does.
        wait: Function that waits for the end.
    """

    port: int
    service: Service
    log: list[str]
    server: _Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def signal(self) -> None:
        """Do what a signal does."""
        self.loop.call_soon_threadsafe(self.server._stop)

    def begin(self, kind: str) -> http.client.HTTPConnection:
        """Send a request."""
        method, path, body = REQUESTS[kind]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection


@contextmanager
def stopping(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, seconds: float
) -> Iterator[Stopping]:
    """Run a server that signals end, in a thread."""
    monkeypatch.setattr(_Server, "capture_signals", lambda _self: nullcontext())
    service = Service(loaded)
    models = {"tiny": ServedModel("tiny", loaded, service)}
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    log: list[str] = []
    app = create_app(ServerState(models, Limits()), log=log.append)
    server = _Server(configuration(app, Limits()), [service], seconds)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([sock]),))
    thread.start()
    try:
        yield Stopping(port, service, log, server, loop, thread)
    finally:
        loop.call_soon_threadsafe(server._stop)
        thread.join(30)
        loop.close()
        service.close(5)


@pytest.fixture
def slow(loaded: LoadedModel) -> LoadedModel:
    """A model that takes 10 ms a pass."""

    class Pause(nullcontext[None]):
        def __enter__(self) -> None:
            time.sleep(0.01)

    return dataclasses.replace(loaded, execution=Execution(Pause))


@pytest.mark.parametrize("signals", [1, 2])
def test_running_requests_get_an_error(
    slow: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    signals: int,
) -> None:
    """At the end of the time, or at a second signal: 503, an event in a stream, no traceback."""
    with stopping(slow, monkeypatch, seconds=0.05 if signals == 1 else 60) as server:
        connections = {kind: server.begin(kind) for kind in REQUESTS}
        while server.service.num_running + server.service.num_waiting < len(REQUESTS):
            time.sleep(0.005)
        for _ in range(signals):
            server.signal()
        replies = {}
        for kind, connection in connections.items():
            response = connection.getresponse()
            replies[kind] = Reply(response.status, dict(response.getheaders()), response.read())
            connection.close()
        server.thread.join(30)
    assert {kind: one.status for kind, one in replies.items()} == {
        "whole": 503,
        "stream": 200,
        "plain": 503,
        "beams": 503,
    }
    assert replies["whole"].json["error"]["code"] == "stopping"
    assert replies["stream"].events[-1]["error"]["code"] == "stopping"
    assert replies["plain"].json == {"message": "the server is stopping"}
    assert all("x-request-id" in one.headers for one in replies.values())
    assert sorted(json.loads(line)["status"] for line in server.log) == [200, 503, 503, 503]
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    assert not server.service.has_failed


def test_a_step_that_hangs_at_the_end(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections are cut after a moment, without a traceback."""
    entered, ends = threading.Event(), threading.Event()

    class Hanging(nullcontext[None]):
        def __enter__(self) -> None:
            entered.set()
            ends.wait(30)

    monkeypatch.setattr(server_module, "_REPLY_SECONDS", 0.05)
    stuck = dataclasses.replace(loaded, execution=Execution(Hanging))
    with stopping(stuck, monkeypatch, seconds=0.05) as server:
        connection = server.begin("whole")
        assert entered.wait(30)
        server.signal()
        with pytest.raises(ConnectionError):
            connection.getresponse()
        connection.close()
        server.thread.join(30)
        ends.set()
    assert [json.loads(line)["status"] for line in server.log] == [499]
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_a_third_signal_ends_connections() -> None:
    """The library waits for their end from Python 3.12.1 on, even if it is to exit at once."""

    async def send_signals() -> None:
        services = [Mock(end_all=Mock(return_value=1))]
        server = _Server(uvicorn.Config("app"), services, 60)
        connections = [Mock(), Mock(transport=None)]
        server.server_state.connections.update(connections)
        server._stop()
        assert server.should_exit
        services[0].end_all.assert_not_called()
        server._stop()
        services[0].end_all.assert_called_once()
        assert not server.force_exit
        connections[0].transport.abort.assert_not_called()
        server._stop()
        assert server.force_exit
        connections[0].transport.abort.assert_called_once()

    asyncio.run(send_signals())
