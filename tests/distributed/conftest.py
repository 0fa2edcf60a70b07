"""Real processes over the loopback interface, each with its own environment."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from suite.warm import WarmPopen

from lmcore.plugin import discover, launch_env, select
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import RankInfo

WORKER = Path(__file__).parent / "worker.py"
LIMIT_SECONDS = 60

CHIP = """
import os
from lmcore.contract import CommBackend, PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl
from lmcore_cpu import plugin as cpu
from lmcore_cpu.plugin import lmcore_create_device, lmcore_op_impls

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("chip", ">=1,<2", provides=("cpu",))

@hookimpl
def lmcore_probe(env):
    found = env.get("CHIP_EVIDENCE", "a chip on the bus")
    return Probe("cpu", ProbeState.PRESENT, 1, 10, (found,))

@hookimpl
def lmcore_comm_backends():
    def register():
        if os.environ.get("CHIP_REGISTER") == "fails":
            raise OSError("libchip.so is missing")
    return [CommBackend("gloo", "cpu", register=register)]
"""


@dataclass(frozen=True)
class Ended:
    """Result of one rank: exit status, printed JSON values, and standard error."""

    status: int
    printed: list[Any]
    errors: str
    seconds: float


@pytest.fixture
def chip(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that lays out a distribution `lmcore-chip` of a version."""

    def install(version: str) -> Path:
        folder = tmp_path / f"site-{version}"
        info = folder / f"lmcore_chip-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / "chip_plugin.py").write_text(CHIP, encoding="utf-8")
        metadata = f"Metadata-Version: 2.1\nName: lmcore-chip\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = "[lmcore.plugins]\nchip = chip_plugin\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        return folder

    return install


@pytest.fixture
def start() -> Callable[..., list[Ended]]:
    """Return a function that runs a scenario of a worker on several ranks."""

    def run(
        scenario: str,
        env: Callable[[int], Mapping[str, str]] = lambda rank: {},
        world_size: int = 2,
        timeout: float = 20.0,
        worker: Path = WORKER,
    ) -> list[Ended]:
        plugins = discover(env={})
        selection = select(plugins, requested="cpu", env={})
        port = _free_port()
        begin = time.monotonic()
        processes = []
        for rank in range(world_size):
            place = RankInfo(rank, rank, world_size, world_size)
            whole = {
                **_inherited(),
                **launch_env(plugins, selection, place.to_dict(), {}),
                **place.to_env(),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                HANDED_DOWN: selection.to_json(),
                "OMP_NUM_THREADS": "1",
                **env(rank),
            }
            processes.append(
                WarmPopen(
                    [sys.executable, str(worker), scenario, str(timeout)],
                    env=whole,
                    stdout=PIPE,
                    stderr=PIPE,
                    text=True,
                )
            )
        return _ended(processes, begin)

    return run


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _ended(processes: list[WarmPopen], begin: float) -> list[Ended]:
    found = []
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=LIMIT_SECONDS)
            values = [json.loads(line) for line in printed.splitlines()]
            took = time.monotonic() - begin
            found.append(Ended(process.returncode, values, errors, took))
        for rank, ended in enumerate(found):  # pytest shows them all if the test fails
            print(f"rank {rank} ended with status {ended.status}\n{ended.errors}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found
