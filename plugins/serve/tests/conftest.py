"""A tiny served model, and servers of it: in a thread of the test, and as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from lmcore.checkpoint import save_checkpoint
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape
from lmcore_serve.app import create_app
from lmcore_serve.served_model import ServedModel
from lmcore_serve.server import configuration, listen
from lmcore_serve.service import Service
from lmcore_serve.state import Limits, ServerState

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


LONG_SHAPE = ModelShape(1, 24, 3, 40, 4096, 384, init_method_std=0.3)


def save_run(directory: Path, seed: int, shape: ModelShape = LONG_SHAPE) -> Path:
    """Write a run with a byte model of random weights that writes letters."""
    model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(seed)
    with torch.no_grad():
        model.head_weight[128:] = 0
        model.head_weight[:32] = 0
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "checkpoints", 5, tensors, {}, model_shape=shape.to_dict())
    save_tokenizer(ByteTokenizer(), directory / "tokenizer")
    return directory


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """Run a server; give its process, port and the lines of its standard error."""
    command = [sys.executable, "-m", "lmcore", "serve", "--device", "cpu", "--port", "0", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    lines: list[str] = []
    ports: queue.Queue[int] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+)", line):
                    ports.put(int(found[1]))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, ports.get(timeout=100), lines
    finally:
        process.kill()
        process.wait()
        reader.join()


@pytest.fixture(scope="session")
def server(loaded: LoadedModel) -> Iterator[Server]:
    """The server of most tests."""
    with running_server(loaded) as made:
        yield made
