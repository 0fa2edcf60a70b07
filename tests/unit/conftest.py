"""Fixtures of all unit tests: ranks that are threads."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.launch.worker_protocol import LaunchInfo
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.process.rendezvous import Rendezvous
from lmcore.runtime.store import new_secret, serve_in_thread


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    """Return a function that calls *body* on every rank, and gives each one's result or error.

    A rank that asks for stacks does not wait long for a missing one's.
    Ranks are threads of one process.  The store is there before the first of them, as a launcher's.
    """
    monkeypatch.setattr("lmcore.runtime.process.watch._STACK_SECONDS", 0.3)

    def run(
        body: Callable[[Rendezvous], Any], world_size: int = 2, timeout: float = 10.0
    ) -> list[Any]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        secret = new_secret()
        handed = LaunchInfo(secret=secret)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **handed.to_env()}

        def one(rank: int) -> Any:
            place = RankInfo(rank, rank, world_size, world_size)
            try:
                with join_processes(place, timeout=timeout, env=env) as rendezvous:
                    return body(rendezvous)
            except Exception as error:  # noqa: BLE001 - compared by the test
                return error

        with (
            serve_in_thread(listener, bytes.fromhex(secret)),
            ThreadPoolExecutor(world_size) as pool,
        ):
            return list(pool.map(one, range(world_size)))

    return run
