"""Processes forked from one that has imported torch: as separate as new interpreters."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.plugin.isolation.subprocess_call import Call, Outcome, call_together
from lmcore_conformance.process.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

_ENV = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def see() -> dict[str, Any]:
    """Return the state of this process."""
    torch = sys.modules.get("torch")
    return {
        "rank": os.environ["RANK"],
        "parent": os.getppid(),
        "leads": os.getpgrp() == os.getpid(),
        "torch": torch is not None,
        "cuda": torch is not None and torch.cuda.is_initialized(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "num_threads": torch.get_num_threads() if torch is not None else None,
    }


def crash() -> Iterator[str]:
    """Yield, and abort."""
    yield "begun"
    os.abort()


def wait() -> Iterator[int]:
    """Yield the pid, and wait longer than the call's time limit."""
    yield os.getpid()
    time.sleep(100)


def leave() -> None:
    """End the process with a status."""
    raise SystemExit(3)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_forked_processes_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes, hangs and exit statuses are reported; another environment has a new interpreter."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    server = ForkServer({**_ENV, "RANK": "0"})

    def call(*names: str, timeout: float = 100.0, **more: str) -> tuple[Outcome, ...]:
        calls = [
            Call(f"test_fork_server:{name}", (), {**_ENV, "RANK": str(rank), **more})
            for rank, name in enumerate(names)
        ]
        return call_together(calls, timeout=timeout, start=server.start)

    first, second = (outcome.value for outcome in call("see", "see"))
    counts = {name: first[name] for name in ("threads", "num_threads")}
    forked = {"leads": True, "torch": True, "cuda": False, **counts}
    assert first["threads"] <= 2  # its own, and the one of `faulthandler`
    assert first == forked | {"rank": "0", "parent": second["parent"]}
    assert second["rank"] == "1"
    assert first["parent"] != os.getpid()

    for number in (1, 3):  # a rank's share of the cores
        (shared,) = call("see", OMP_NUM_THREADS=str(number))
        assert shared.value["parent"] == first["parent"]
        assert shared.value["num_threads"] == number

    (crashed,) = call("crash")
    assert crashed.values == ("begun",)
    assert "the process was killed by SIGABRT" in crashed.fault
    assert "`crash` (test_fork_server.py" in crashed.fault

    (hung,) = call("wait", timeout=3.0)
    assert hung.fault.startswith("no answer within 3 s; stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(hung.value, 0)

    (left,) = call("leave")
    assert "the process ended with status 3" in left.fault

    (other,) = call("see", LMCORE_OTHER="1")
    assert other.value["parent"] == os.getpid()
