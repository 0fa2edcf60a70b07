"""The live display on a real terminal, which is given back however the run ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite.warm import WarmPopen

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def on_terminal(data_prefix: str, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs `lmcore train` with stderr on a pseudo-terminal; returns status and what was drawn."""

    def go(flags: str, number: signal.Signals | None = None) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        tiny = (
            "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
            " --micro-batch-size 4 --num-threads 1 --sample-tokens 0 --eval-iters 0"
            " --cpu-peak-seconds 0"
        )
        argv = ["train", *tiny.split(), "--data-path", data_prefix, "--save", str(tmp_path / "run")]
        process = WarmPopen(
            [sys.executable, "-m", "lmcore.cli.main", *argv, *flags.split()],
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        drawn: list[bytes] = []

        def read() -> None:
            while True:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    return
                drawn.append(data)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            if number is not None:
                end = time.monotonic() + 60
                while HIDE.encode() not in b"".join(drawn) and time.monotonic() < end:
                    time.sleep(0.02)
                process.send_signal(number)
            process.communicate(timeout=90)
        finally:
            process.kill()
            process.wait()
            reader.join(timeout=10)
            os.close(ours)
        return process.returncode, b"".join(drawn).decode()

    return go


def test_success(on_terminal: Any) -> None:
    """A run shows its progress in place and no training lines; the cursor comes back."""
    status, drawn = on_terminal("--train-iters 30")
    assert status == 0, drawn
    assert drawn.count(HIDE) == drawn.count(SHOW) == 1
    assert "step 30/30" in drawn
    assert "100%" in drawn
    assert " iteration " not in drawn
    assert drawn.index(HIDE) < drawn.index(SHOW)


def test_failure(on_terminal: Any) -> None:
    """The message of a run that failed is below the view, on a terminal that works."""
    status, drawn = on_terminal("--train-iters 30 --lr 1e30 --clip-grad 0")
    assert status == 1
    assert drawn.count(SHOW) == 1
    assert drawn.index(SHOW) < drawn.index("error: ")
    assert re.search(r"(^|[\r\n])error: ", drawn[drawn.index(SHOW) + len(SHOW) :])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal(on_terminal: Any, number: signal.Signals) -> None:
    """A run that is interrupted gives the terminal back and says where it saved."""
    status, drawn = on_terminal("--train-iters 100000", number)
    assert status == 0, drawn
    assert drawn.count(HIDE) == drawn.count(SHOW) == 1
    assert "saved " in drawn
