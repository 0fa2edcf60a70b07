"""A stranger on the host of a run: it reads and changes nothing, and the run is undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcore.runtime.store import StoreClient, StoreError

pytestmark = [pytest.mark.distributed, pytest.mark.full]

FLAGS = "--train-iters 100000 --lr-decay-iters 100000 --hidden-dropout 0.1"
LISTENING, LOOPBACK = "0A", ("0100007F", "00000000000000000000000001000000")
HALF_HANDSHAKE = b"\x00" * 40
GARBAGE = [
    b"\xff" * 1000,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    (2**62).to_bytes(8, "little") * 20,
    (2**62).to_bytes(8, "big") * 20,
    os.urandom(5000),
    HALF_HANDSHAKE,
    # What a client of torch's own store sends, to set the key of a failure.
    b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x01" + (6).to_bytes(8, "little") + b"failed",
]


def tree(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [
                one for kid in (task / "children").read_text().split() for one in tree(int(kid))
            ]
    return found


def listening(pids: Sequence[int]) -> dict[int, str]:
    """Return the ports at which processes listen, with their addresses as the kernel shows them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENING and fields[9] in inodes:
                found[int(port, 16)] = address
    return found


def free_port() -> str:
    """Return a port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextlib.contextmanager
def started(how: str, argv: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a run of two processes in one of three ways; the first has rank 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    env.pop("XDG_STATE_HOME", None)
    lmcore = ["-m", "lmcore", *argv]
    commands = [([*lmcore, "--nproc-per-node", "2"], env)]
    if how == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        commands = [([*torchrun, "--master-port", free_port(), *lmcore], env)]
    if how == "by hand":
        host = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname()}
        env |= host | {"MASTER_PORT": free_port()}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        commands = [(lmcore, env | rank) for rank in ranks]
    processes = [
        subprocess.Popen([sys.executable, *command], env=own, stdout=subprocess.DEVNULL)
        for command, own in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def attack(port: int) -> None:
    """Do at a port what needs no secret."""
    for garbage in GARBAGE:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stream:
            stream.settimeout(0.2)
            stream.sendall(garbage)
            answer = stream.recv(4096)
            assert b"lmcore/" not in answer
            assert b"vocab" not in answer
    with pytest.raises(StoreError):
        StoreClient("127.0.0.1", port, b"a guessed secret, of 32 bytes...", timeout=2.0).set(
            "failed", b"\xff"
        )


@pytest.mark.parametrize("how", ["launcher", "by hand", "torchrun"])
def test_an_attacked_run(arguments: Any, signal_after: Any, tmp_path: Path, how: str) -> None:
    """Its ports are the loopback interface's, and its losses equal an undisturbed run's."""
    with started(how, arguments("attacked", FLAGS), tmp_path) as processes:
        signal_after(processes[0], tmp_path / "attacked", 2, signal.SIGCONT)
        pids = [pid for process in processes for pid in tree(process.pid)]
        if how == "torchrun":  # its own store listens everywhere, and is not lmcore's
            pids = pids[1:]
        ports = listening(pids)
        assert ports
        assert set(ports.values()) <= set(LOOPBACK)
        for port in ports:
            attack(port)
        with contextlib.ExitStack() as idle:
            for index in range(1500):
                port = list(ports)[index % len(ports)]
                idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
            seen = (tmp_path / "attacked" / "metrics.jsonl").read_bytes().count(b"\n")
            signal_after(processes[0], tmp_path / "attacked", seen + 10, signal.SIGTERM)
            end = time.monotonic() + 60
            while any(process.poll() is None for process in processes):
                assert time.monotonic() < end
                time.sleep(0.05)
    if how != "torchrun":  # which ends with an error after any signal
        assert {process.returncode for process in processes} == {0}
    attacked = [row["loss"] for row in train_rows(tmp_path / "attacked")]
    assert len(attacked) > 10
    quiet = tmp_path / "quiet"
    with started("launcher", arguments("quiet", f"{FLAGS} --exit-interval 10"), tmp_path) as alone:
        assert alone[0].wait(timeout=120) == 0
    assert [row["loss"] for row in train_rows(quiet)] == attacked[:10]


def train_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics."""
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
