"""Ranks that are copies of their launcher: what they have of it, how they end, when there are none.

Each case is a launcher in a separate process, which has not imported torch before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")

HEAD = """
import json, os, signal, sys, threading, time
from pathlib import Path
from lmcore.runtime.launch.launcher import launch
from lmcore.runtime.launch.fork import can_fork
read = {"before": "the launcher"}
command = [sys.executable, "-c", "print('a new program')"]
def go(function, size=2, load=lambda: None, **env):
    try:
        sys.exit(launch(command, size, {**os.environ, **env}, function=function, load=load))
    except KeyboardInterrupt:  # came before the launcher was ready to pass it on
        sys.stderr.write("interrupted\\n")
        sys.exit(130)
"""


def launcher(script: str) -> subprocess.Popen[str]:
    """Start a launcher that runs *script*."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
    text = HEAD + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(script: str) -> tuple[int, str, str]:
    """Return how a launcher ended: its status, standard output and standard error."""
    with launcher(script) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def test_what_a_copy_has(tmp_path: Path) -> None:
    """It has the launcher's data, and its own place, environment and process group."""
    script = f"""
        def work():
            rank = os.environ["RANK"]
            print("out", rank)
            print("err", rank, file=sys.stderr)
            found = [read["before"], os.environ["MORE"], os.getpgrp() == os.getpid(), os.getppid()]
            Path({str(tmp_path)!r}, rank).write_text(json.dumps(found))
            return 0
        print(os.getpid())
        go(work, 3, MORE="yes")
    """
    status, out, err = ended(script)
    assert status == 0, err
    pid, *shown = out.splitlines()
    assert shown == ["out 0"]
    assert sorted(err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]
    for rank in "012":
        found = json.loads((tmp_path / rank).read_text())
        assert found == ["the launcher", "yes", True, int(pid)]


def test_no_rank_has_the_socket() -> None:
    """The launcher alone has the store: a stopped rank cannot keep its port open."""
    script = """
        import socket
        def work():
            time.sleep(0.5)
            port = json.loads(os.environ["LMCORE_LAUNCHED"])["store_port"]
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5)
            except ConnectionRefusedError:
                return 0
            return 7
        # The launcher holds the socket as long as it runs: here it lets go of it.
        import lmcore.runtime.launch.launcher as module
        wait = module._Workers.wait

        def closed(workers):
            descriptor = workers.server.fileno()
            replacement = socket.socket()
            os.dup2(replacement.fileno(), descriptor)
            replacement.close()
            return wait(workers)

        module._Workers.wait = closed
        go(work)
    """
    status, _, err = ended(script)
    assert status == 0, err


THREAD = "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()"
TORCH = "import types; sys.modules['torch'] = types.ModuleType('torch')"


@pytest.mark.parametrize("spoiler", [THREAD, TORCH])
def test_when_no_copy_is_made(spoiler: str) -> None:
    """Beside another thread, or after torch, the processes are new programs."""
    status, out, err = ended(f"{spoiler}\ngo(lambda: 9, load=lambda: print('loaded'))")
    assert status == 0, err
    assert out == "a new program\n"


def test_what_is_loaded_for_copies() -> None:
    """It is loaded once, in the launcher, and torch works in the copies."""
    script = """
        def load():
            import torch
            print("loaded")
        def work():
            torch = sys.modules["torch"]
            assert (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0] == 300
            return 0
        go(work, load=load)
    """
    status, out, err = ended(script)
    assert status == 0, err
    assert out == "loaded\n"


def test_loading_that_starts_a_thread() -> None:
    """The processes are new programs then."""
    status, out, err = ended(f"def load():\n    {THREAD}\ngo(lambda: 9, load=load)")
    assert status == 0, err
    assert out == "a new program\n"


def test_threads_that_end_for_a_copy_do_not_count() -> None:
    """A numerical library's threads, which know of copies, keep nobody from being one."""
    script = """
        import numpy
        numpy.ones((300, 300)) @ numpy.ones((300, 300))
        go(lambda: print("copy", (numpy.ones((300, 300)) @ numpy.ones((300, 300)))[0, 0]) or 0)
    """
    status, out, err = ended(script)
    assert status == 0, err
    assert out == "copy 300.0\n"


def test_failures() -> None:
    """An error that nobody has expected is shown, a status is passed on, a signal named."""
    status, _, err = ended("go(lambda: 1 / 0 if os.environ['RANK'] == '1' else 0)")
    assert status == 1
    assert "[rank 1] ZeroDivisionError" in err
    assert "rank 1 of 2 ended with exit status 1" in err
    status, _, err = ended("go(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0)")
    assert status == 1
    assert "was killed by SIGKILL" in err


def test_interrupted() -> None:
    """Ctrl-C at the launcher comes to every copy once, and is reported once."""
    script = """
        def work():
            os.write(2, b"ready\\n")  # at once, so that the copies' lines do not mix
            time.sleep(60)
            return 0
        go(work)
    """
    with launcher(script) as process:
        assert process.stderr is not None
        for _ in range(2):
            assert "ready" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err == "interrupted\n"


def test_copies_end_with_their_launcher() -> None:
    """Each copy is killed if the launcher is killed."""
    script = """
        from lmcore.runtime.launch.worker_protocol import end_with_launcher
        def work():
            end_with_launcher(os.environ)
            os.write(2, b"%d\\n" % os.getpid())  # at once, as above
            time.sleep(60)
            return 0
        go(work)
    """
    with launcher(script) as process:
        assert process.stderr is not None
        pids = [int(process.stderr.readline().split()[-1]) for _ in range(2)]
        process.kill()
        end = time.monotonic() + 20
        while any(_alive(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
