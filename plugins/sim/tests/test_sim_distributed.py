"""simccl: two processes, each with its own device."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from suite.warm import WarmPopen

WORKER = Path(__file__).with_name("distributed_worker.py")
pytestmark = pytest.mark.distributed

Start = Callable[..., list[WarmPopen]]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Return a function that starts two processes; they are killed at the test's end."""
    processes: list[WarmPopen] = []

    def go(case: str, **env: str) -> list[WarmPopen]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = str(sock.getsockname()[1])
        for rank in range(2):
            command = [sys.executable, str(WORKER), case, str(rank), "2", port]
            processes.append(
                WarmPopen(
                    command,
                    stdout=PIPE,
                    stderr=PIPE,
                    text=True,
                    env=environment | {"RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "2000"} | env,
                )
            )
        return processes

    yield go
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "case",
    ["reductions", "movements", "messages", "groups", "trace", "ddp", "fsdp", "tensor_parallel"],
)
def test_two_processes(start: Start, case: str) -> None:
    """Collectives move the right numbers; data, sharded and tensor parallel train as one."""
    for process in start(case):
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err


def test_a_collective_hangs(start: Start) -> None:
    """One process hangs in its second reduction; the other one times out."""
    first, second = start("faulty", LMCORE_SIM_FAULTS="hang:all_reduce@2#1", SECONDS="2")
    _, err = first.communicate(timeout=60)
    assert first.returncode != 0
    assert "Timed out" in err
    assert second.poll() is None or second.returncode != 0


def test_a_collective_is_wrong(start: Start) -> None:
    """A wrong reduction is wrong on one process, by its factor."""
    outs = []
    for process in start("faulty", LMCORE_SIM_FAULTS="wrong:all_reduce@2=3#1"):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        outs.append(out.strip())
    assert outs == ["[4.0, 4.0]", "[12.0, 12.0]"]


def test_a_collective_fails(start: Start) -> None:
    """A failing collective raises where it is called."""
    processes = start("faulty", LMCORE_SIM_FAULTS="fail:all_reduce@2")
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "all_reduce failed, as LMCORE_SIM_FAULTS told it to" in err
