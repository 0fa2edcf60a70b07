"""A tiny served model, and a server of it that listens on a free port."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.generation.load import LoadedModel
from lmcore.generation.text_model import PLAIN
from lmcore.model.shape import ModelShape
from lmcore.serving.app import create_app
from lmcore.serving.served_model import ServedModel
from lmcore.serving.server import configuration, listen
from lmcore.serving.service import Service
from lmcore.serving.state import Limits, ServerState

# 257 real ids of the byte tokenizer, padded.
SHAPE = ModelShape(1, 24, 3, 40, 96, 384, init_method_std=0.3)


def new_loaded(seed: int = 7) -> LoadedModel:
    """Make a model with random weights that writes letters; other bytes and ends are improbable."""
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
    model.initialize(seed)
    with torch.no_grad():
        model.head_weight[128:] = 0
        model.head_weight[:32] = 0
    return LoadedModel(model.eval(), ByteTokenizer(), Path("iter_0000001"), PLAIN)


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The model of most tests."""
    return new_loaded()


@dataclass
class Reply:
    """Reply of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which ends with `[DONE]`."""
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    @property
    def message(self) -> str:
        """The message of an error."""
        found: str = self.json.get("error", self.json)["message"]
        return found


@dataclass
class Server:
    """A server in a thread.

    Attributes:
        port: Port that it listens on.
        models: Models by name.
        log: Lines of the access log.
    """

    port: int
    models: dict[str, ServedModel]
    log: list[str] = field(default_factory=list)

    def connect(self, timeout: float = 30) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """Send a request and return the reply.

        Args:
            path: Path of the endpoint.
            body: Bytes, or a value that is sent as JSON.
            method: HTTP method; default: of the endpoint.
            headers: Further headers.
        """
        connection = self.connect()
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = method or ("PUT" if path == "/api" else "GET" if body is None else "POST")
        sent = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, raw, sent | (headers or {}))
        response = connection.getresponse()
        reply = Reply(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
        connection.close()
        return reply


@contextmanager
def running_server(
    loaded: LoadedModel,
    *,
    limits: Limits | None = None,
    max_running: int = 4,
    max_waiting: int = 8,
    others: dict[str, LoadedModel] | None = None,
    change: Callable[[ServedModel], ServedModel] = lambda model: model,
    **options: Any,
) -> Iterator[Server]:
    """Run a server within the context."""
    services = {
        name: Service(one, max_running=max_running, max_waiting=max_waiting)
        for name, one in ({"tiny": loaded} | (others or {})).items()
    }
    models = {
        name: change(ServedModel(name, loaded if name == "tiny" else (others or {})[name], service))
        for name, service in services.items()
    }
    sock = listen("127.0.0.1", 0)
    server = Server(sock.getsockname()[1], models)
    limits = limits or Limits()
    app = create_app(ServerState(models, limits), log=server.log.append, **options)
    running = uvicorn.Server(configuration(app, limits))
    running.install_signal_handlers = lambda: None  # type: ignore[method-assign,unused-ignore]
    thread = threading.Thread(
        target=lambda: asyncio.run(running.serve(sockets=[sock])), daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        running.should_exit = True
        thread.join(10)
        with suppress(OSError):
            sock.close()
        for service in services.values():
            service.close(5)


@pytest.fixture(scope="session")
def server(loaded: LoadedModel) -> Iterator[Server]:
    """The server of most tests."""
    with running_server(loaded) as made:
        yield made
