"""Plugins that crash, hang or leave: tried in a copy of the process, they harm nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import psutil
import pytest

from lmcore.contract import PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl
from lmcore.plugin import PluginState, discover, select
from lmcore.plugin import discovery as discovery_module
from lmcore.plugin.isolation.fork_trial import can_try, try_each

pytestmark = pytest.mark.skipif(not can_try(), reason="this system has no fork")


def crash() -> None:
    """Read address 0, as a broken library does."""
    ctypes.string_at(0)


def hang() -> None:
    """Wait for longer than any test."""
    time.sleep(600)


class Point:
    """An entry point whose import does what the test says."""

    def __init__(self, name, at_import=None, probe=None):
        self.name, self.value, self.dist = name, f"{name}.plugin", None
        self.at_import, self.probe = at_import, probe
        self.more = {}

    def load(self):
        if self.at_import:
            self.at_import()
        plugin = type(sys)(self.name)
        plugin.lmcore_plugin_info = hookimpl(lambda: PluginInfo(self.name, ">=1,<2"))
        if self.probe:
            plugin.lmcore_probe = hookimpl(self.probe)
        for hook, function in self.more.items():
            setattr(plugin, hook, hookimpl(function))
        return plugin


def present(name, priority=100):
    return lambda: Probe(name, ProbeState.PRESENT, 1, priority, (f"{name} is here",))


CPU = Point("cpu", probe=present("cpu", 0))


def by_name(points, **env):
    return {one.name: one for one in discover(env=env, entry_points=[CPU, *points])}


def test_a_crash_at_import_is_a_failed_plugin_and_the_others_live():
    """The signal and the place are its reason; plugins after it are probed all the same."""
    found = by_name([Point("bad", crash), Point("good", probe=present("good"))])
    assert found["bad"].state is PluginState.FAILED
    assert found["bad"].reason.startswith(
        "import of `bad.plugin`: the process was killed by SIGSEGV"
    )
    assert "it was in `string_at`" in found["bad"].reason
    assert "test_fork_trial.py" in found["bad"].traceback
    assert found["good"].probe.evidence == ("good is here",)


def test_a_crash_in_a_probe_names_the_hook():
    """The module was fine; its probe was not."""
    found = by_name([Point("bad", probe=crash)])
    assert found["bad"].state is PluginState.FAILED
    assert found["bad"].reason.startswith("`lmcore_probe`: the process was killed by SIGSEGV")


def test_a_crash_while_it_registers_names_the_hook():
    """The hooks that add to the command line are tried too, and what they raise is not lost."""
    bad, good = Point("bad"), Point("good")
    bad.more = {"lmcore_add_options": lambda registry: crash()}
    good.more = {"lmcore_add_commands": lambda registry: registry.add("x", "y:z", "does")}
    found = by_name([bad, good])
    assert found["bad"].reason.startswith("`lmcore_add_options`: the process was killed by SIGSEGV")
    assert found["good"].state is PluginState.USABLE


def test_a_hang_ends_after_the_time_limit(monkeypatch):
    """A driver that does not answer is a failed plugin, one for each that hangs."""
    monkeypatch.setattr(discovery_module, "_TRIAL_SECONDS", 0.3)
    began = time.monotonic()
    found = by_name([Point("one", hang), Point("two", probe=hang), Point("z", probe=present("z"))])
    assert time.monotonic() - began < 10
    assert found["one"].reason.startswith("import of `one.plugin`: no answer within 0.3 s")
    assert found["two"].reason.startswith("`lmcore_probe`: no answer within 0.3 s")
    assert found["z"].probe is not None


@pytest.mark.parametrize(
    "leave, how",
    [
        (lambda: os._exit(0), "ended with status 0"),
        (lambda: os._exit(3), "ended with status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (os.abort, "was killed by SIGABRT"),
    ],
)
def test_leaving_the_process_is_no_way_out(leave, how):
    """A plugin that ends the process at import, even in peace, is failed and says how."""
    found = by_name([Point("gone", leave)])
    assert f"import of `gone.plugin`: the process {how}" in found["gone"].reason


def test_the_last_words_are_the_cause():
    """Without a stack, the last line on standard error is shown."""

    def complain():
        os.write(2, b"undefined symbol: frobnicate\n")
        os._exit(127)

    reason = by_name([Point("old", complain)])["old"].reason
    assert reason.endswith("ended with status 127; last line: undefined symbol: frobnicate")


def test_a_crashed_plugin_never_means_the_cpu():
    """It has not said that its device is absent."""
    plugins = discover(env={}, entry_points=[CPU, Point("bad", crash)])
    with pytest.raises(Exception, match="`bad` is installed and cannot say") as error:
        select(plugins, env={})
    assert "SIGSEGV" in error.value.why
    assert select(plugins, requested="cpu", env={}).plugin == "cpu"


def test_what_a_probe_does_to_its_process_ends_with_it():
    """The parent's memory and environment are as before; only the answer comes back."""
    seen = []

    def probe():
        seen.append(os.getpid())
        os.environ["LEFT_BY_A_PROBE"] = "1"
        print("noise")
        return Probe("x", ProbeState.BROKEN, 0, evidence=("a", "b"), fix="mend", facts={"n": [1]})

    found = by_name([Point("x", probe=probe)])["x"].probe
    assert not seen
    assert "LEFT_BY_A_PROBE" not in os.environ
    assert found == Probe("x", ProbeState.BROKEN, 0, 100, ("a", "b"), "mend", {"n": [1]})


def test_an_exception_keeps_its_reason_and_traceback():
    """An exception of a probe in the copy is reported as if it were raised here."""

    def probe():
        raise RuntimeError("driver 1 is too old")

    found = by_name([Point("x", probe=probe)])["x"]
    assert found.state is PluginState.FAILED
    assert "RuntimeError: driver 1 is too old" in found.reason
    assert "driver 1 is too old" in found.traceback


def test_attempts_answer_in_order_and_big_answers_arrive():
    """Each attempt has its own answer, longer than a pipe's buffer too."""
    text = "x" * 1_000_000
    found = try_each({"a": lambda at: {"n": 1}, "b": lambda at: {"text": text}}, seconds=20)
    assert found["a"].answer == {"n": 1}
    assert found["b"].answer["text"] == text


def test_the_time_limit_is_each_attempts_own():
    """Three that take most of it each are all in time."""

    def slow(at):
        time.sleep(0.3)
        return {"done": True}

    found = try_each(dict.fromkeys("abc", slow), seconds=0.6)
    assert [one.answer for one in found.values()] == [{"done": True}] * 3


def test_a_plugin_that_forks_the_process_is_failed():
    """Its copy would run the command a second time; a child that ends within the plugin may be."""

    def fork_and_return():
        os.fork()

    def fork_and_end():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    bad = Point("bad", fork_and_return, probe=present("bad"))
    late = Point("late", probe=lambda: (os.fork(), present("late")())[1])
    good = Point("good", fork_and_end, probe=present("good"))
    found = by_name([bad, late, good])
    assert found["bad"].reason == (
        "import of `bad.plugin`: it forked the process, and the second one continued as lmcore"
    )
    assert found["late"].reason.startswith("`lmcore_probe`: it forked the process")
    assert found["good"].probe.evidence == ("good is here",)


def test_a_plugin_cannot_change_the_result_of_another():
    """A thread that one leaves behind and that ends the process is not another one's fault."""
    here = os.getpid()

    def end_later():
        if os.getpid() != here:
            threading.Timer(0.05, os._exit, [7]).start()

    def slow():
        time.sleep(0.3)
        return Probe("zslow", ProbeState.PRESENT, 1, evidence=("here",))

    for _ in range(3):
        found = by_name([Point("aleaves", end_later), Point("zslow", probe=slow)])
        assert found["zslow"].state is PluginState.USABLE
        assert found["zslow"].probe.evidence == ("here",)


def test_a_plugin_that_closes_all_files_ends_in_time():
    """Its answer cannot come: it is failed by the time limit at the latest."""

    def close_and_hang():
        os.closerange(3, 256)
        hang()

    found = try_each({"a": lambda at: close_and_hang() or {}}, seconds=0.3)
    assert found["a"].fault.startswith("no answer within 0.3 s")


def test_a_plugin_that_closes_all_files_fails_no_other():
    """Others answer while it hangs, whatever the order."""

    def close_and_hang(at):
        time.sleep(0.1)
        at("a phase, whose limit is later than that of the others")
        os.closerange(3, 256)
        hang()

    def answer(at):
        time.sleep(0.3)
        return {"value": 1}

    for names in ("ab", "ba"):
        attempts = {"a": close_and_hang, "b": answer}
        found = try_each({name: attempts[name] for name in names}, seconds=1)
        assert found["a"].fault == "no answer within 1 s"
        assert (found["b"].fault, found["b"].answer) == ("", {"value": 1})


def test_what_a_plugin_prints_goes_to_standard_error(capfd):
    """At import, in its hooks and by native code: standard output is the command's."""

    def print_everywhere():
        print("python says hello")
        os.write(1, b"native says hello\n")
        libc = ctypes.CDLL(None)
        libc.puts(b"libc says hello")

    loud = Point("loud", print_everywhere, probe=present("loud"))
    loud.more = {"lmcore_add_commands": lambda registry: print("hook says hello")}
    found = by_name([loud])["loud"]
    found.call("lmcore_add_commands", registry=None)
    print("the result")
    out, err = capfd.readouterr()
    assert out == "the result\n"
    for said in ("python", "native", "libc", "hook"):
        assert f"{said} says hello" in err


def test_a_slow_plugin_is_named(monkeypatch):
    """By wall time, as it sleeps; the choice of the device warns of it."""
    monkeypatch.setattr(discovery_module, "_SLOW_SECONDS", 0.2)
    sleepy = Point("sleepy", probe=lambda: (time.sleep(0.3), present("sleepy")())[1])
    plugins = discover(env={}, entry_points=[CPU, sleepy])
    slow = plugins.usable_record("sleepy").slow
    assert slow.startswith("`lmcore_probe` took 0.")
    warning = f"plugin `sleepy` (unknown distribution unknown) is slow: {slow}"
    assert warning in select(plugins, env={}).warnings


def test_no_process_is_left():
    """After a crash and a hang, this process has the children that it had before."""
    before = psutil.Process().children()
    try_each({"a": lambda at: crash(), "b": lambda at: hang()}, seconds=0.3)
    assert psutil.Process().children() == before


def test_threads_of_the_host_do_not_matter():
    """A host with threads can try plugins too."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert by_name([Point("good", probe=present("good"))])["good"].probe is not None
    finally:
        stop.set()
        thread.join()
