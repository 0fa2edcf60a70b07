"""Calls in separate processes: what comes back, and how a bad end is reported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lmcore.plugin.isolation.subprocess_call import (
    HUNG,
    Call,
    call_isolated,
    call_together,
    start_program,
)

SOURCE = """
import ctypes, os, signal, subprocess, sys, time
from lmcore.base.errors import DeviceError

def double(number):
    print("noise")
    return 2 * number

def several():
    yield "one"
    yield {"two": 2}

def crash():
    yield "before"
    ctypes.string_at(0)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def leave(status):
    sys.stderr.write("some reason\\n")
    sys.stderr.flush()
    os._exit(status)

def exit_():
    raise SystemExit(4)

def fail():
    raise OSError("no pulse")

def refuse():
    raise DeviceError("no device", why="it\\nhides", hint="look")

def no_json():
    return object()

def hang():
    yield "before"
    time.sleep(1000)

def watched():
    import faulthandler, threading
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    faulthandler.dump_traceback_later(0.2, exit=True)
    time.sleep(1000)

def leave_after(line):
    sys.stderr.write(line)
    leave(1)

def leave_after_stacks():
    import faulthandler
    faulthandler.dump_traceback_later(0.1)
    time.sleep(0.5)
    leave(1)

def crash_at_exit():
    import atexit
    atexit.register(lambda: ctypes.string_at(0))
    return "answered"

def environment(name):
    return os.environ.get(name)

def leave_child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    return child.pid
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "subject.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_a_value_comes_back():
    """JSON values go in and out; what is printed does not matter."""
    outcome = call_isolated("subject:double", 21, timeout=30)
    assert (outcome.complete, outcome.value, outcome.fault) == (True, 42, "")
    assert 0 < outcome.seconds < 30


def test_yielded_values_come_back_in_order():
    """A generator gives its values one by one."""
    assert call_isolated("subject:several", timeout=30).values == ("one", {"two": 2})


@pytest.mark.parametrize(
    "function, arguments, fault",
    [
        ("kill", (), "the process was killed by SIGKILL"),
        ("leave", (7,), "the process ended with status 7; last line: some reason"),
        ("leave", (0,), "the process ended with status 0; last line: some reason"),
        ("exit_", (), "the process ended with status 4"),
        ("fail", (), "OSError: no pulse"),
        ("refuse", (), "no device: it; hides"),
        ("no_json", (), "TypeError: Object of type object is not JSON serializable"),
        ("nonesuch", (), "AttributeError: module 'subject' has no attribute 'nonesuch'"),
    ],
)
def test_a_crash_is_reported_in_one_line(function, arguments, fault):
    """Signals, statuses and exceptions each have their words."""
    outcome = call_isolated(f"subject:{function}", *arguments, timeout=30)
    assert outcome.fault == fault
    assert not outcome.complete
    assert outcome.value is None


def test_a_crash_keeps_what_came_before_and_says_where():
    """The values given before a native crash are there, and the function that crashed."""
    outcome = call_isolated("subject:crash", timeout=30)
    assert outcome.values == ("before",)
    assert outcome.fault.startswith("the process was killed by SIGSEGV; it was in `string_at`")


def test_a_crash_after_the_answer_is_a_fault_too():
    """The value is kept, and the crash at the process's end is reported."""
    outcome = call_isolated("subject:crash_at_exit", timeout=30)
    assert outcome.value == "answered"
    assert "killed by SIGSEGV after it had answered" in outcome.fault


def test_a_hang_is_stopped_and_says_where():
    """The time limit holds, and the function that hangs is named."""
    begun = []

    def start(env, arguments, log):
        running = start_program(env, arguments, log)
        _await_text(Path(arguments[2]), "before")  # a slow start of the interpreter is no hang
        begun.append(time.monotonic())
        return running

    (outcome,) = call_together([Call("subject:hang")], timeout=2, start=start)
    assert time.monotonic() - begun[0] < 10
    assert outcome.values == ("before",)
    assert outcome.fault.startswith("no answer within 2 s; stopped; it was in `hang` (subject.py")


def _await_text(file: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {file.name}"
        time.sleep(0.02)


def test_a_process_that_its_own_watchdog_ends():
    """The stacks of `faulthandler` are the last of its output, and the function is named."""
    outcome = call_isolated("subject:watched", timeout=30)
    assert outcome.fault.startswith(f"{HUNG}; stopped; it was in `watched` (subject.py, line ")


@pytest.mark.parametrize(
    "function, arguments",
    [
        ("leave_after", ("Timeout (30 s) of the driver\n",)),
        ("leave_after", ("RuntimeError: Timeout (0:00:05)!\n",)),
        ("leave_after", ("Timeout (0:00:05)!\n",)),
        ("leave_after_stacks", ()),
    ],
)
def test_other_timeouts_are_no_hang(function, arguments):
    """A process that mentions a timeout, or has shown its stacks and continued, has not hung."""
    outcome = call_isolated(f"subject:{function}", *arguments, timeout=30)
    assert outcome.fault.startswith("the process ended with status 1")


def test_a_child_of_the_process_ends_with_it(tmp_path):
    """A process that the function started does not survive it."""
    pid = call_isolated("subject:leave_child", str(tmp_path), timeout=30).value
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_environment_is_the_callers_choice():
    """A call has the environment that it is given, or this process's."""
    given = {**os.environ, "COLOUR": "green"}
    assert call_isolated("subject:environment", "COLOUR", timeout=30, env=given).value == "green"
    assert call_isolated("subject:environment", "COLOUR", timeout=30).value is None


def test_when_one_fails_the_others_get_a_moment():
    """A call that waits for a failed one is stopped after the grace time, not the whole limit."""
    begin = time.monotonic()
    first, second, third = call_together(
        [Call("subject:double", (1,)), Call("subject:leave", (3,)), Call("subject:hang")],
        timeout=60,
        grace=0.5,
    )
    assert time.monotonic() - begin < 20
    assert first.value == 2
    assert "status 3" in second.fault
    assert third.fault == "no answer; stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_call_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Nothing of the plugin runs on after `kill -9` of the command."""
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time\ndef sleep(file):\n    open(file, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n",
        encoding="utf-8",
    )
    file = tmp_path / "pid"
    program = (
        "from lmcore.plugin.isolation.subprocess_call import call_isolated\n"
        f"call_isolated('sleeper:sleep', {str(file)!r}, timeout=600)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(file.read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < deadline:
        if not Path(f"/proc/{child}/cmdline").read_bytes():  # ended, not yet collected
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline
