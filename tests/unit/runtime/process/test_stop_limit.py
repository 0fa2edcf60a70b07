"""Limit on the time that a process takes to stop while a call does not return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from lmcore.runtime.process import stop_guard
from lmcore.runtime.process.stop_limit import StopLimit

HEAD = """
import ctypes, os, signal, sys, threading, time
from lmcore.runtime.process import stop_limit
from lmcore.runtime.process.stop_limit import StopLimit

stop_limit._REPEATED_SECONDS = 0.5
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))

def ready():
    print("ready", flush=True)

def hang(library=ctypes.CDLL):
    mutex = ctypes.create_string_buffer(64)  # zeros are a mutex that nobody has
    for _ in range(2):  # the second call never returns; no signal interrupts it
        library(None).pthread_mutex_lock(mutex)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its mutex begins with zeros")


def run(body: str, *signals: tuple[float, int]) -> tuple[int, str, str, float]:
    """Run a script that says when it is ready; return status, output, errors and time since then.

    Args:
        body: The script after `HEAD`.
        *signals: Signals, each with the time to wait before it is sent.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    for after, number in signals:
        time.sleep(after)
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - begin


def test_a_call_that_does_not_return_ends_the_process() -> None:
    """The error shows the call, the work and the signal, and the owner gets it before the end."""
    status, out, err, _ = run(
        """
        with StopLimit(0.5) as limit:
            limit.activity = lambda: "step 7 on `chip:0`"
            limit.ended = lambda error: print("ended", error.what, flush=True)
            ready()
            hang()
        """,
        (0, signal.SIGTERM),
    )
    what = "step 7 on `chip:0` did not end within 0.5 seconds of SIGTERM"
    assert status == 143
    assert out == f"ended {what}\n"
    assert err.startswith(f"error: {what}\nwhy: a call of the main thread does not return:\n")
    assert "hang (<string>, line 1" in err
    assert "`--stop-timeout-minutes` changes the limit" in err


def test_native_code_that_keeps_the_global_lock_is_killed() -> None:
    """No thread of the process runs then; the guard needs none."""
    status, _, err, _ = run(
        """
        with StopLimit(0.5):
            ready()
            hang(ctypes.PyDLL)
        """,
        (0, signal.SIGTERM),
    )
    assert status == -signal.SIGKILL
    assert "did not stop, and is killed" in err
    assert "keeps Python's global lock" in err


def test_progress_is_not_ended() -> None:
    """A process that takes many times the limit to stop, in many calls, comes to its own end."""
    status, out, err, seconds = run(
        """
        def step():
            time.sleep(0.1)

        def work():
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                step()

        with StopLimit(0.6):
            ready()
            work()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()  # a single call of the main thread, while another thread works
        print("done", len(signals))
        """,
        (0, signal.SIGTERM),
    )
    assert (status, out, err) == (0, "done 1\n", "")
    assert seconds > 4


def test_a_thread_that_hangs_is_found_in_a_wait_for_it() -> None:
    """A checkpoint is copied by a thread, for which the main thread waits."""
    status, _, err, _ = run(
        """
        with StopLimit(0.5):
            thread = threading.Thread(target=hang, daemon=True)
            thread.start()
            ready()
            thread.join()
        """,
        (0, signal.SIGTERM),
    )
    assert status == 143
    assert "did not end within 0.5 seconds of SIGTERM" in err


def test_a_second_signal_shortens_the_limit() -> None:
    """The user wants the run to end at once; a signal that comes twice within moments is one."""
    status, _, err, seconds = run(
        """
        with StopLimit(30):
            ready()
            hang()
        """,
        (0, signal.SIGTERM),
        (0.1, signal.SIGTERM),
        (1, signal.SIGTERM),
    )
    assert status == 143
    assert "did not end within 0.5 seconds of SIGTERM" in err
    assert seconds < 25


def test_a_program_that_goes_on_withdraws_the_limit() -> None:
    """A dialogue takes Ctrl-C as the end of an answer, and waits for the next line for long."""
    status, out, err, _ = run(
        """
        with StopLimit(0.5) as limit:
            ready()
            while not signals:
                time.sleep(0.01)
            limit.withdraw()
            mutex = threading.Lock()
            mutex.acquire()
            mutex.acquire(timeout=5)  # a single call, longer than the limit
            print("goes on", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            hang()
        """,
        (0.2, signal.SIGTERM),
    )
    assert (status, out) == (143, "goes on\n")
    assert "did not end within 0.5 seconds of SIGTERM" in err


def test_another_part_of_the_run_begins_the_limit() -> None:
    """Such as the failure of another process; the process fails as that one did."""
    status, _, err, _ = run(
        """
        with StopLimit(0.5) as limit:
            threading.Timer(0.2, limit.request, ["the failure of another process"]).start()
            ready()
            hang()
        """
    )
    assert status == 1
    assert "the start of the run did not end within 0.5 seconds of the failure of another" in err


def test_signals_of_forked_processes_are_theirs() -> None:
    """A worker of the data pool that is ended by a signal does not end the run."""
    status, out, err, _ = run(
        """
        with StopLimit(0.5):
            ready()
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(len(signals))
            assert os.waitpid(child, 0)[1] == 256
            mutex = threading.Lock()
            mutex.acquire()
            mutex.acquire(timeout=2.5)  # a single call, longer than the limit
        print("done", len(signals))
        """
    )
    assert (status, out, err) == (0, "done 0\n", "")


def test_nothing_is_left() -> None:
    """Guard, thread and Python's setting for signals end with the context; 0 starts nothing."""
    assert signal.set_wakeup_fd(-1) == -1
    with StopLimit(60) as limit:
        guard = limit._guard
        assert guard is not None
        assert guard.poll() is None
    assert guard.poll() == 0
    assert signal.set_wakeup_fd(-1) == -1
    with StopLimit(0) as limit:
        assert limit._guard is None


def test_a_guard_whose_process_has_ended_says_nothing() -> None:
    """Nobody reads its question any more; what it would print is on the terminal of the user."""
    (reading, to_guard), (from_guard, writing) = os.pipe(), os.pipe()
    os.close(from_guard)
    os.write(to_guard, bytes([signal.SIGTERM]))
    ended = subprocess.run(
        [sys.executable, "-I", "-S", stop_guard.__file__, "60", "5", str(reading), str(writing)],
        pass_fds=(reading, writing),
        capture_output=True,
        timeout=60,
        check=False,
    )
    for descriptor in (reading, to_guard, writing):
        os.close(descriptor)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_guard_kills_no_other_process_than_its_parent() -> None:
    """The number of a process that has ended may be another's by now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stop_guard._kill(other.pid)
        other.communicate(b"\n", timeout=60)
    assert other.returncode == 0
