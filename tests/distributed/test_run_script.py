"""`lmcore run` with two processes: torch's own rendezvous, failures, signals, the terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
from suite import warm
from suite.warm import WarmPopen

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "lmcore", "run", "--nproc-per-node", "2", "--device", "cpu"]
LIMIT_SECONDS = 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no variables of a launcher."""
    for name in os.environ:
        if name.startswith("LMCORE") or name in {"RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else lines of two ranks mix
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(script: str, *arguments: str) -> WarmPopen:
    """Start a script that finds `os`, `sys`, `time` and `rank`."""
    head = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
    Path("job.py").write_text(head + script, encoding="utf-8")
    command = [*COMMAND, "job.py", *arguments]
    return WarmPopen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True)


def ended(script: str, *arguments: str) -> tuple[int, list[str], str]:
    """Return how a script ended: exit status, sorted lines of its output, standard error."""
    with start(script, *arguments) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except BaseException:
            process.kill()
            raise
    return process.returncode, sorted(out.splitlines()), err


def test_a_script_of_torchs_own(folder: Path) -> None:
    """It connects by itself; if a rank fails, its traceback comes once, and no effect of it."""
    status, out, err = ended(
        """
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(2) * (rank + 1)
distributed.all_reduce(total)
print(total.tolist())
open_file = open(f"{rank}.txt", "w")
open_file.write("closed by the interpreter's end")
if rank == 1:
    raise ValueError(sys.argv[1])
distributed.all_reduce(total)
""",
        "bad data",
    )
    assert status == 1
    assert out == ["[3.0, 3.0]", "[rank 1] [3.0, 3.0]"]
    assert err == (
        f'Traceback (most recent call last):\n  File "{folder}/job.py", line 13, in <module>\n'
        "    raise ValueError(sys.argv[1])\nValueError: bad data\n\n"
        "from rank 1 of 2\n  rank 0: stopped because of it\n"
    )
    for rank in "01":
        assert (folder / f"{rank}.txt").read_text() == "closed by the interpreter's end"


def test_a_device_of_a_plugin(chip: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes have the launcher's choice, and only its plugin sets their variables."""
    paths = [str(chip("1.0")), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    status, out, err = ended(
        "import json\nprint(json.loads(os.environ['LMCORE_SELECTION'])['plugin'])\n"
    )
    assert (status, out, err) == (0, ["[rank 1] chip", "chip"], "")


def test_an_error_of_lmcore() -> None:
    """The message names the line of the script; the status is the error's."""
    status, _, err = ended(
        """
from lmcore.runtime.launch.rank import rank_info
def begin():
    rank_info({"RANK": "x"})
if rank == 1:
    begin()
"""
    )
    assert status == 2
    assert err.startswith(
        "error: `RANK=x` is not a number of processes or a rank\n"
        'at: job.py, line 6: rank_info({"RANK": "x"})\nwhy: '
    )
    assert err.endswith("\nfrom rank 1 of 2\n  rank 0: exit status 0\n")


def test_a_rank_that_ends_first() -> None:
    """The other rank runs to its end."""
    status, out, err = ended("time.sleep(0.5 * rank)\nprint('end')\nsys.exit(0)\n")
    assert (status, out, err) == (0, ["[rank 1] end", "end"], "")


WAIT = """
open(f"{rank}.pid", "w").write(str(os.getpid()))
try:
    time.sleep(60)
finally:
    print("closed")
"""


def wait_for_both(folder: Path) -> list[int]:
    """Return the process ids of both ranks when they have written them."""
    end = time.monotonic() + LIMIT_SECONDS
    files = [folder / "0.pid", folder / "1.pid"]
    while time.monotonic() < end:
        if all(file.exists() and file.read_text() for file in files):
            time.sleep(0.1)  # until they sleep
            return [int(file.read_text()) for file in files]
        time.sleep(0.01)
    raise AssertionError


def test_an_interrupt(folder: Path) -> None:
    """Ctrl-C raises KeyboardInterrupt in both, once, and is reported in one word."""
    with start(WAIT) as process:
        wait_for_both(folder)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[rank 1] closed", "closed"]
    assert err == "interrupted\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_of_the_launcher(folder: Path, number: signal.Signals) -> None:
    """SIGTERM ends the script as it does without lmcore; a killed launcher leaves none behind."""
    with start(WAIT) as process:
        pids = wait_for_both(folder)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_SECONDS)
        end = time.monotonic() + LIMIT_SECONDS
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(map(is_running, pids))
    terminated = number == signal.SIGTERM
    assert process.returncode == (143 if terminated else -number)
    assert err == ("terminated\n" if terminated else "")


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_terminal(folder: Path) -> None:
    """Rank 0 reads what is typed, as from a terminal."""
    (folder / "job.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '0':\n"
        "    print('tty', sys.stdin.isatty(), 'name', input('name? '))\n"
    )
    spawn = "import os, pty, sys\nsys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    done = warm.run(
        [sys.executable, "-c", spawn, *COMMAND, "job.py"],
        input="Ada\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    assert "tty True name Ada" in done.stdout
