"""Discovery, isolation and selection of plugins."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import types
from dataclasses import replace

import pytest

from lmcore.base.errors import ConfigError, DeviceError, PluginError
from lmcore.config.load import load_config
from lmcore.config.section import Config
from lmcore.contract import (
    Check,
    CheckpointStager,
    CheckStatus,
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    PrecisionPolicy,
    Probe,
    ProbeState,
    Problem,
    RecomputePolicy,
    full_precision_policy,
    none_policy,
    standard_precision_policies,
)
from lmcore.contract.probe import API_VERSION
from lmcore.hookspecs import hookimpl
from lmcore.plugin import (
    PluginRecord,
    PluginSet,
    PluginState,
    Selection,
    build_op_table,
    checkpoint_stagers,
    choose_comm_backend,
    choose_precision,
    choose_recompute,
    comm_backends,
    create_device,
    discover,
    doctor_checks,
    launch_env,
    op_impls,
    precision_policies,
    recompute_policies,
    run_end,
    run_start,
    select,
    validate_config,
    verify,
)
from lmcore.plugin.hook_calls import DEFAULT_OFFERS

PRESENT, ABSENT, BROKEN = ProbeState.PRESENT, ProbeState.ABSENT, ProbeState.BROKEN


class Point:
    """An entry point that loads an object made by the test."""

    def __init__(self, name, plugin, distribution=None, version="1.0"):
        self.name = name
        self.value = f"{name}.plugin"
        self.plugin = plugin
        self.dist = types.SimpleNamespace(name=distribution or f"lmcore-{name}", version=version)

    def load(self):
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


def probe_of(device_type, state=PRESENT, priority=100, **more):
    more.setdefault("evidence", (f"{device_type} looked at",))
    more.setdefault("count", 0 if state is ABSENT else 1)
    if state is BROKEN:
        more.setdefault("fix", f"mend {device_type}")
    return Probe(device_type, state, priority=priority, **more)


def plugin_of(name, probe=None, *, info=None, **hooks):
    """Return a plugin object; a hook's value is returned, raised, or called."""
    answers = {"lmcore_plugin_info": info or PluginInfo(name, ">=1,<2"), **hooks}
    if probe is not None:
        answers["lmcore_probe"] = probe
    plugin = types.SimpleNamespace()
    for hook, answer in answers.items():
        setattr(plugin, hook, hookimpl(answer if callable(answer) else _returning(answer)))
    return plugin


def _returning(answer):
    def implementation():
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return implementation


def point(name, probe=None, **more):
    return Point(name, plugin_of(name, probe, **more))


CPU_POINT = point("cpu", probe_of("cpu", priority=0))


def found(*points, **env):
    return discover(env=env, entry_points=[CPU_POINT, *points])


def record(plugins, name):
    (one,) = [one for one in plugins if one.name == name]
    return one


# Discovery


def test_a_good_plugin_is_usable_and_keeps_what_it_said():
    """A plugin that loads has its info, probe, distribution and version in its record."""
    one = record(found(point("chip", probe_of("chip"))), "chip")
    assert (one.state, one.distribution, one.version) == (PluginState.USABLE, "lmcore-chip", "1.0")
    assert one.info == PluginInfo("chip", ">=1,<2")
    assert one.probe == probe_of("chip")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libfoo.so: undefined symbol"),
        RuntimeError("boom"),
        SystemExit(3),
        SyntaxError(),
    ],
)
def test_a_plugin_that_raises_at_import_fails_alone(error):
    """Its record has the cause and the traceback, and the others live."""
    plugins = found(Point("bad", error), point("chip", probe_of("chip")))
    bad = record(plugins, "bad")
    assert bad.state is PluginState.FAILED
    assert type(error).__name__ in bad.reason
    assert str(error) in bad.reason or not str(error)
    assert "Traceback" in bad.traceback
    assert {one.name for one in plugins.usable} == {"cpu", "chip"}


def test_the_first_cause_of_an_import_error_is_shown():
    """A chain of exceptions names its root, which is what must be fixed."""
    outer = ImportError("cannot load backend")
    outer.__cause__ = OSError("libchip.so.4: cannot open shared object file")
    reason = record(found(Point("bad", outer)), "bad").reason
    assert "cannot load backend" in reason
    assert "libchip.so.4: cannot open" in reason


def _unknown_argument():
    def lmcore_probe(env, phase_of_moon):
        return probe_of("chip")

    return plugin_of("bad", lmcore_probe)


def _unknown_hook():
    plugin = plugin_of("bad")
    plugin.lmcore_prob = hookimpl(lambda: None)
    plugin.lmcore_prob.__name__ = "lmcore_prob"
    return plugin


def _unmarked_hook():
    def lmcore_probe(env):
        return probe_of("chip")

    plugin = plugin_of("bad")
    plugin.lmcore_probe = lmcore_probe
    return plugin


def _defaulted_argument():
    def lmcore_probe(env=None):
        return probe_of("chip")

    return plugin_of("bad", lmcore_probe)


def _wrapper():
    def lmcore_probe(env):
        return (yield)

    plugin = plugin_of("bad")
    plugin.lmcore_probe = hookimpl(wrapper=True)(lmcore_probe)
    return plugin


@pytest.mark.parametrize(
    "make, words",
    [
        (
            _unknown_argument,
            ["`lmcore_probe` has no argument `phase_of_moon`", "its arguments: `env`"],
        ),
        (_unknown_hook, ["`lmcore_prob` is not a hook", "did you mean `lmcore_probe`?"]),
        (_unmarked_hook, ["lmcore_probe", "@hookimpl"]),
        (_defaulted_argument, ["env", "default"]),
        (_wrapper, ["wrapper"]),
        (types.SimpleNamespace, ["lmcore_plugin_info"]),
    ],
)
def test_a_hook_that_would_not_be_called_as_meant_fails_its_plugin(make, words):
    """Unknown arguments and names, missing markers, defaults and wrappers are named."""
    plugins = found(Point("bad", make()), point("chip", probe_of("chip")))
    bad = record(plugins, "bad")
    assert bad.state is PluginState.FAILED
    for word in words:
        assert word in bad.reason
    assert record(plugins, "chip").state is PluginState.USABLE


@pytest.mark.parametrize(
    "info, words",
    [
        (None, "not a `PluginInfo`"),
        ({"name": "bad"}, "not a `PluginInfo`"),
        (PluginInfo("", ">=1"), "`name`"),
        (PluginInfo("bad", "one"), "`api`"),
        (PluginInfo("bad", ">=1", torch="new"), "`torch`"),
        (PluginInfo("bad", ">=1", provides="bad"), "`provides`"),
        (ValueError("no info today"), "no info today"),
    ],
)
def test_wrong_info_fails_the_plugin(info, words):
    """The result of `lmcore_plugin_info` is checked, including its fields."""
    plugin = plugin_of("bad", lmcore_plugin_info=info)
    bad = record(found(Point("bad", plugin)), "bad")
    assert bad.state is PluginState.FAILED
    assert words in bad.reason


@pytest.mark.parametrize(
    "probe, words",
    [
        ({"state": "present"}, "not a `Probe`"),
        (probe_of(""), "`device_type`"),
        (Probe("chip", "present", 1), "`state`"),
        (probe_of("chip", count="2"), "`count`"),
        (probe_of("chip", count=0), "present with 0 devices"),
        (probe_of("chip", ABSENT, count=2), "absent with 2 devices"),
        (probe_of("chip", BROKEN, count=-1), "broken with -1 devices"),
        (probe_of("chip", evidence="seen"), "`evidence`"),
        (probe_of("chip", fix=3), "`fix`"),
        (probe_of("chip", facts={"a": object()}), "`facts`"),
        (OSError("driver hung up"), "driver hung up"),
        (SystemExit(1), "SystemExit"),
    ],
)
def test_a_wrong_or_raising_probe_fails_the_plugin(probe, words):
    """A wrong result or an exception of `lmcore_probe` affects only its plugin's record."""
    plugins = found(point("bad", probe), point("chip", probe_of("chip")))
    bad = record(plugins, "bad")
    assert bad.state is PluginState.FAILED
    assert words in bad.reason
    assert "Traceback" in bad.traceback
    assert bad.info is not None
    assert record(plugins, "chip").state is PluginState.USABLE


@pytest.mark.parametrize(
    "api, refused",
    [
        (">=1,<2", False),
        (">=1.0,<2", False),
        (f"=={API_VERSION}", False),
        (">=2", True),
        ("<1", True),
        (f">{API_VERSION}", True),
    ],
)
def test_an_api_range_without_ours_refuses_the_plugin(api, refused):
    """A plugin for another version of the contract is refused, with both versions named."""
    stale = record(found(point("stale", info=PluginInfo("stale", api))), "stale")
    assert (stale.state is PluginState.REFUSED) is refused
    if refused:
        assert api in stale.reason
        assert f"this lmcore has {API_VERSION};" in stale.reason


@pytest.mark.parametrize(
    "installed, wanted, refused",
    [
        ("2.13.0+cpu", ">=2.11", False),
        ("2.13.0", "<2.13", True),
        ("2.13.0a0+c0ffee", ">=2.13", False),
        ("2.10.1+cu126", ">=2.11", True),
        ("2.14.0.dev20260701", ">=2.11,<2.14", True),
    ],
)
def test_a_torch_range_without_the_installed_one_refuses_the_plugin(
    monkeypatch, installed, wanted, refused
):
    """Local parts and pre-releases count as the release that they belong to."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    stale = record(found(point("stale", info=PluginInfo("stale", ">=1", wanted))), "stale")
    assert (stale.state is PluginState.REFUSED) is refused
    if refused:
        assert installed in stale.reason
        assert wanted in stale.reason


def test_a_refused_plugin_is_not_probed():
    """None of a refused plugin's other hooks is called."""
    called = []
    plugin = plugin_of("stale", lambda: called.append(1), info=PluginInfo("stale", ">=9"))
    found(Point("stale", plugin))
    assert not called


def test_two_entry_points_of_one_name_fail_and_name_both_distributions():
    """Neither is loaded, and every other plugin lives."""
    loaded = []

    class Loud(Point):
        def load(self):
            loaded.append(self.dist.name)
            return super().load()

    twins = [Loud("twin", plugin_of("twin"), f"lmcore-{one}") for one in ("a", "b")]
    plugins = found(*twins, point("chip", probe_of("chip")))
    failed = [one for one in plugins if one.name == "twin"]
    assert [one.state for one in failed] == [PluginState.FAILED] * 2
    for one in failed:
        assert "lmcore-a" in one.reason
        assert "lmcore-b" in one.reason
    assert not loaded
    assert {one.name for one in plugins.usable} == {"cpu", "chip"}


def test_two_plugins_that_call_themselves_the_same_fail_and_name_both_distributions():
    """Names inside `PluginInfo` must be unique, like names of entry points."""
    first = Point("a", plugin_of("twin", probe_of("twin")))
    second = Point("b", plugin_of("twin", probe_of("twin")))
    plugins = found(first, second, point("chip", probe_of("chip")))
    failed = [one for one in plugins if one.name == "twin"]
    assert [one.state for one in failed] == [PluginState.FAILED] * 2
    assert all("lmcore-a" in one.reason and "lmcore-b" in one.reason for one in failed)
    assert {one.name for one in plugins.usable} == {"cpu", "chip"}


def test_the_allow_list_leaves_others_unloaded():
    """`LMCORE_PLUGINS` names what is loaded beside the CPU; an empty one leaves the CPU alone."""
    points = [point("a", probe_of("a")), Point("b", ImportError("never imported"))]
    states = {one.name: one.state for one in found(*points, LMCORE_PLUGINS="a")}
    assert states == {"a": "usable", "b": "off", "cpu": "usable"}
    states = {one.name: one.state for one in found(*points, LMCORE_PLUGINS="")}
    assert states == {"a": "off", "b": "off", "cpu": "usable"}
    assert record(found(*points), "b").state is PluginState.FAILED


def test_an_unknown_name_in_the_allow_list_is_an_error():
    """A typo must not silently mean the CPU."""
    with pytest.raises(ConfigError, match="chpi") as error:
        found(point("chip", probe_of("chip")), LMCORE_PLUGINS="chpi")
    assert "did you mean `chip`" in error.value.hint


def test_the_probe_gets_the_environment_and_cannot_change_it():
    """A probe sees the variables; what it writes stays with it."""

    def lmcore_probe(env):
        env["CHIP"] = "9"
        return probe_of("chip", facts={"order": env["ORDER"]})

    env = {"ORDER": "66"}
    plugins = discover(env=env, entry_points=[point("chip", lmcore_probe)])
    assert record(plugins, "chip").probe.facts == {"order": "66"}
    assert env == {"ORDER": "66"}


def test_installed_plugins_are_found_without_torch():
    """The CPU plugin is found by its entry point like any other."""
    cpu = record(discover(env={"LMCORE_PLUGINS": ""}), "cpu")
    assert (cpu.state, cpu.distribution) == (PluginState.USABLE, "lmcore")


# Selection

STATES = ["present", "absent", "broken", "failed", "refused", "none"]


def _in_state(name, state, priority):
    if state == "failed":
        return [Point(name, ImportError(f"{name} is broken inside"))]
    if state == "refused":
        info = PluginInfo(name, ">=9", provides=(name,))
        return [point(name, probe_of(name), info=info)]
    if state == "none":
        return []
    return [point(name, probe_of(name, ProbeState(state), priority))]


def expected(first, second, priorities, requested):
    """Return the outcome that the rules demand: a device type, or "error"."""
    states = {"aaa": first, "bbb": second, "cpu": "present"}
    if requested is not None:
        return requested if states[requested] == "present" else "error"
    accelerators = [states["aaa"], states["bbb"]]
    if "broken" in accelerators:
        return "error"
    present = [name for name in ("aaa", "bbb") if states[name] == "present"]
    if len(present) == 2:
        by_priority = dict(zip(("aaa", "bbb"), priorities, strict=True))
        top = max(present, key=by_priority.__getitem__)
        return "error" if priorities[0] == priorities[1] else top
    if present:
        return present[0]
    return "error" if {"failed", "refused"} & set(accelerators) else "cpu"


@pytest.mark.parametrize(
    "priorities",
    [
        *((100, 100), (100, 50)),
        pytest.param((1, 2), marks=pytest.mark.full),
        pytest.param((-5, 0), marks=pytest.mark.full),
    ],
)
def test_selection_over_all_combinations(priorities):
    """Every combination of states, priorities and overrides ends as the rules say."""
    for first, second in itertools.product(STATES, STATES):
        plugins = found(
            *_in_state("aaa", first, priorities[0]), *_in_state("bbb", second, priorities[1])
        )
        for requested, how in itertools.product([None, "aaa", "bbb", "cpu"], ["flag", "variable"]):
            env = {"LMCORE_DEVICE": requested} if requested and how == "variable" else {}
            flag = requested if how == "flag" else None
            wanted = expected(first, second, priorities, requested)
            case = (first, second, priorities, requested, how)
            if wanted == "error":
                with pytest.raises(DeviceError) as error:
                    select(plugins, requested=flag, env=env)
                assert error.value.hint, case
                assert error.value.exit_status == 2, case
            else:
                chosen = select(plugins, requested=flag, env=env)
                assert chosen.probe.device_type == wanted, case


def test_the_flag_goes_before_the_variable():
    """`--device` wins over `LMCORE_DEVICE`."""
    plugins = found(point("chip", probe_of("chip")))
    assert select(plugins, requested="cpu", env={"LMCORE_DEVICE": "chip"}).plugin == "cpu"
    assert select(plugins, env={"LMCORE_DEVICE": "cpu"}).plugin == "cpu"
    assert select(plugins, env={"LMCORE_DEVICE": " "}).plugin == "chip"


def test_the_cpu_is_chosen_with_a_notice_of_what_the_others_said():
    """Falling to the CPU is one line that names each absent plugin and its evidence."""
    chosen = select(found(point("chip", probe_of("chip", ABSENT))), env={})
    assert chosen.plugin == "cpu"
    assert "`chip`: chip looked at" in chosen.notice
    assert "\n" not in chosen.notice
    alone = select(found(), env={})
    assert "no accelerator plugin is installed" in alone.notice


def test_a_present_accelerator_is_chosen_without_a_notice():
    """The expected choice needs no line."""
    assert select(found(point("chip", probe_of("chip"))), env={}).notice is None


def test_a_broken_device_stops_with_its_evidence_and_fix():
    """Hardware that is there and unusable is never passed over in silence."""
    with pytest.raises(DeviceError, match="`chip` is there") as error:
        select(found(point("chip", probe_of("chip", BROKEN))), env={})
    assert "chip looked at" in error.value.why
    assert "mend chip" in error.value.hint
    assert "--device cpu" in error.value.hint


def test_a_broken_device_named_by_flag_shows_evidence_and_fix():
    """Asking for it does not make it work."""
    with pytest.raises(DeviceError, match="`--device chip`: this device is broken") as error:
        select(found(point("chip", probe_of("chip", BROKEN))), requested="chip", env={})
    assert "chip looked at" in error.value.why
    assert "mend chip" in error.value.hint


def test_two_devices_of_equal_right_are_listed():
    """At equal priority the user chooses, and the message says how."""
    with pytest.raises(DeviceError, match="equal priority 100") as error:
        select(found(point("a", probe_of("a")), point("b", probe_of("b"))), env={})
    assert "`--device a` or `--device b`" in error.value.hint
    assert "a looked at" in error.value.why
    assert "b looked at" in error.value.why


@pytest.mark.parametrize("first", ["a", "chip"])
def test_two_plugins_for_one_device_type_are_distinguished_by_name(first):
    """`--device` chooses between them, also if one is called like the device type."""
    plugins = found(point(first, probe_of("chip")), point("b", probe_of("chip")))
    with pytest.raises(DeviceError, match="equal priority") as error:
        select(plugins, env={})
    assert all(f"`--device {name}`" in error.value.hint for name in (first, "b"))
    for name in (first, "b"):
        assert select(plugins, requested=name, env={}).plugin == name
    if first != "chip":
        with pytest.raises(DeviceError, match="equal priority"):
            select(plugins, requested="chip", env={})


def test_a_higher_priority_goes_before_the_name_of_the_device_type():
    """`--device chip` means the type; a plugin that is called like it has no precedence."""
    plugins = found(
        point("chip", probe_of("chip")), point("better", probe_of("chip", priority=200))
    )
    assert select(plugins, requested="chip", env={}).plugin == "better"


def test_a_plugin_that_cannot_say_absent_does_not_mean_the_cpu():
    """A failed plugin stops automatic selection with its root cause and the ways out."""
    plugins = found(Point("chip", ImportError("libchip.so.4 not found")))
    with pytest.raises(DeviceError, match="cannot say") as error:
        select(plugins, env={})
    assert "libchip.so.4 not found" in error.value.why
    assert "--device cpu" in error.value.hint
    assert select(plugins, requested="cpu", env={}).plugin == "cpu"


def test_several_plugins_and_devices_are_in_the_plural():
    """The messages about several have another verb and pronoun."""
    plugins = found(Point("a", ImportError("libx.so")), Point("b", ImportError("liby.so")))
    with pytest.raises(DeviceError) as error:
        select(plugins, env={})
    what = "plugins `a`, `b` are installed and cannot say whether their devices are here"
    assert error.value.what == what
    assert error.value.hint.startswith("fix or uninstall them; to continue without them: ")
    plugins = found(*(point(name, probe_of(name, ProbeState.BROKEN)) for name in ("chip", "die")))
    with pytest.raises(DeviceError) as error:
        select(plugins, env={})
    assert set(error.value.what.split()) >= {"devices", "`chip`,", "`die`", "are"}
    assert "to continue without them: " in error.value.hint


def test_two_plugins_of_one_name_are_named_once():
    """The message has the name that both gave themselves once, and both distributions."""
    info = PluginInfo("chip", ">=1,<2")
    plugins = found(point("a", probe_of("chip"), info=info), point("b", probe_of("x"), info=info))
    with pytest.raises(DeviceError, match="plugin `chip` is installed") as error:
        select(plugins, env={})
    assert "lmcore-a" in error.value.why
    assert "lmcore-b" in error.value.why


def test_a_failed_plugin_does_not_take_a_present_one_down():
    """With a device present, what failed beside it is a warning with the root cause."""
    plugins = found(Point("bad", ImportError("libbad.so")), point("chip", probe_of("chip")))
    chosen = select(plugins, env={})
    assert chosen.plugin == "chip"
    (warning,) = chosen.warnings
    assert "libbad.so" in warning
    assert "lmcore-bad" in warning


def test_a_refused_plugin_without_a_probe_is_only_a_warning():
    """A refused plugin that is known to have no device does not prevent a choice."""
    plugins = found(point("words", info=PluginInfo("words", ">=9")))
    chosen = select(plugins, env={})
    assert chosen.plugin == "cpu"
    assert len(chosen.warnings) == 1


def test_an_unknown_device_lists_the_installed_and_the_package():
    """The message has the nearest name and all names, and makes up no package."""
    with pytest.raises(DeviceError, match="`--device chpi`") as error:
        select(found(point("chip", probe_of("chip"))), requested="chpi", env={})
    assert "did you mean `chip`?" in error.value.hint
    assert "`cpu`" in error.value.hint
    assert "lmcore-chpi" not in error.value.hint
    assert "pip install" not in error.value.hint  # an index may have another one of that name


def test_the_cpu_is_no_guess_for_another_device():
    """`gpu` is one letter from `cpu`, and means something else."""
    with pytest.raises(DeviceError) as error:
        select(found(), requested="gpu", env={})
    assert "did you mean" not in error.value.hint
    assert "known: `cpu`" in error.value.hint


@pytest.mark.parametrize("off", [False, True])
def test_a_device_whose_plugin_is_out_of_service_is_explained(off):
    """A request for what a refused or left-out plugin provides says so."""
    info = PluginInfo("maker", ">=9" if not off else ">=1", provides=("chip",))
    env = {"LMCORE_PLUGINS": ""} if off else {}
    plugins = found(point("maker", probe_of("chip"), info=info), **env)
    with pytest.raises(DeviceError) as error:
        select(plugins, requested="maker" if off else "chip", env={})
    assert "`maker` (lmcore-maker 1.0)" in error.value.why
    assert "install that" not in error.value.hint


def test_a_broken_or_missing_cpu_is_an_error():
    """Without any device there is nothing to fall back to."""
    with pytest.raises(DeviceError, match="not even the CPU"):
        select(discover(env={}, entry_points=[]), env={})
    broken = discover(env={}, entry_points=[point("cpu", probe_of("cpu", BROKEN))])
    with pytest.raises(DeviceError) as error:
        select(broken, env={})
    assert "mend cpu" in error.value.hint


def test_another_cpu_plugin_goes_by_priority():
    """Two plugins for the host are ranked like any others."""
    plugins = found(point("fast", probe_of("cpu", priority=5)))
    assert select(plugins, env={}).plugin == "fast"


def test_a_selection_survives_json():
    """A worker reads back exactly what the launcher decided."""
    plugins = found(
        point("chip", probe_of("chip", facts={"driver": "1.2", "names": ["x"]})),
        Point("bad", ImportError("no")),
    )
    chosen = select(plugins, env={})
    assert Selection.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"probe": {"state": "odd"}}', "null"])
def test_a_garbled_selection_is_an_error(text):
    """Any other text is refused with an explanation."""
    with pytest.raises(PluginError, match="selection cannot be read"):
        Selection.from_json(text)


def test_a_worker_that_would_choose_otherwise_stops():
    """Another state, version or plugin on a worker ends the run with both evidences."""
    launcher = select(found(point("chip", probe_of("chip"))), env={})
    verify(launcher, found(point("chip", probe_of("chip"))))
    for others in (
        found(point("chip", probe_of("chip", BROKEN))),
        found(Point("chip", plugin_of("chip", probe_of("chip")), version="2.0")),
        found(point("chip", probe_of("other"))),
    ):
        with pytest.raises(DeviceError) as error:
            verify(launcher, others)
        assert "launcher: chip looked at" in error.value.why
        assert "here:" in error.value.why
    with pytest.raises(PluginError, match="cannot be used"):
        verify(launcher, found())


# The hooks


def device_of(device_type="chip"):
    """Return a device whose functions do nothing, which no test calls."""
    optional = ["memory_stats", "reset_peak_memory", "empty_cache", "pin_memory", "new_stream",
                "new_event", "peak_flops"]  # fmt: skip
    return Device(
        device_type, 0, device_type, frozenset({"float32"}), *([lambda *_: None] * 5),
        missing=dict.fromkeys(optional, "a stand-in"),
    )  # fmt: skip


def chip(**hooks):
    """Return plugins with a chosen `chip` that has these hooks, and the selection."""
    plugins = found(point("chip", probe_of("chip"), **hooks))
    return plugins, select(plugins, env={})


LISTS = {
    "lmcore_comm_backends": (comm_backends, CommBackend("fabric", "chip")),
    "lmcore_op_impls": (op_impls, OpImpl("attention", "fast", "x:y")),
    "lmcore_precision_policies": (precision_policies, full_precision_policy()),
    "lmcore_recompute_policies": (recompute_policies, none_policy()),
    "lmcore_checkpoint_stagers": (checkpoint_stagers, CheckpointStager("spool", dict)),
    "lmcore_validate_config": (validate_config, Problem("too big")),
}


def call_list(hook, plugins, selection):
    wrapper, _ = LISTS[hook]
    more = [Config()] if hook == "lmcore_validate_config" else []
    return wrapper(plugins, selection, device_of(), *more)


@pytest.mark.parametrize("ability", ["compile", "deterministic"])
def test_a_setting_that_the_device_has_a_reason_against_is_refused(ability):
    """The core refuses it, before the plugin's own problems, with the reason; others are not."""
    plugins, selection = chip(lmcore_validate_config=[Problem("too big")])
    config = load_config([f"--{ability}"]).config
    able = device_of()
    assert validate_config(plugins, selection, able, config) == (Problem("too big"),)
    device = replace(able, missing={**able.missing, ability: "not on this chip"})
    assert validate_config(plugins, selection, device, Config()) == (Problem("too big"),)
    found = validate_config(plugins, selection, device, config)
    refusal = Problem(
        f"`--{ability}` does not work on device `chip`",
        why="not on this chip",
        hint=f"leave `--{ability}` out, or use another device",
    )
    assert found == (refusal, Problem("too big"))


@pytest.mark.parametrize("hook", LISTS)
def test_list_hooks_return_what_the_plugin_offers(hook):
    """A list of the right kind arrives; what a run binds carries the name of its plugin."""
    one = LISTS[hook][1]
    wanted = one if isinstance(one, Problem) else replace(one, plugin="chip")
    assert call_list(hook, *chip(**{hook: [one]})) == (wanted,)
    if hook not in DEFAULT_OFFERS:
        assert call_list(hook, *chip()) == ()


def test_the_core_offers_what_a_devices_plugin_leaves_out():
    """Precisions by the device's dtypes, recompute policies, torch's backend; also beside others.

    An extension's offers come with them, and replace none.
    """
    plugins = found(
        point("chip", probe_of("chip")),
        point("extra", lmcore_recompute_policies=[replace(none_policy(), name="rare")]),
    )
    selection = select(plugins, env={})
    device = replace(device_of(), dtypes=frozenset({"float32", "bfloat16"}))
    precisions = precision_policies(plugins, selection, device)
    usable = {one.name for one in precisions if one.available() is None}
    assert usable == {"fp32", "bf16"}
    assert choose_precision(precisions, None).name == "fp32"
    names = [one.name for one in recompute_policies(plugins, selection, device)]
    assert {"none", "full", "selective", "rare"} <= set(names)
    assert {one.plugin for one in precisions} == {"lmcore"}
    assert comm_backends(plugins, selection, device) == ()  # torch has none registered for it
    host = replace(device, type="cpu")
    assert [one.name for one in comm_backends(plugins, selection, host)] == ["gloo"]


@pytest.mark.parametrize("default", ["bf16", "fp32"])
def test_a_device_may_prefer_another_standard_precision(default):
    """The named one is the default if the device computes in its dtype, else float32 is."""
    device = replace(device_of(), dtypes=frozenset({"float32", "bfloat16"}))
    offered = standard_precision_policies(device, default=default)
    plugins, selection = chip(lmcore_precision_policies=offered)
    assert choose_precision(precision_policies(plugins, selection, device), None).name == default
    narrow = precision_policies(plugins, selection, device_of())
    assert choose_precision(narrow, None).name == "fp32"


@pytest.mark.parametrize("answer", [None, 3, "text", ["text"], {}, [None]])
@pytest.mark.parametrize("hook", LISTS)
def test_list_hooks_refuse_what_is_no_list_of_the_right_kind(hook, answer):
    """The message names plugin, hook and what came back."""
    with pytest.raises(PluginError) as error:
        call_list(hook, *chip(**{hook: answer}))
    assert "`chip`" in error.value.what
    assert hook in error.value.what
    returned = answer[0] if isinstance(answer, list) else answer
    assert f"returned `{type(returned).__name__}`" in error.value.what
    assert repr(returned) in str(error.value.why)


@pytest.mark.parametrize("hook", LISTS)
def test_a_raising_hook_of_the_chosen_plugin_is_an_error(hook):
    """The error names plugin and hook and keeps the cause."""
    with pytest.raises(PluginError, match=hook) as error:
        call_list(hook, *chip(**{hook: OSError("chip is on fire")}))
    assert "chip is on fire" in error.value.why
    assert isinstance(error.value.__cause__, OSError)


def test_an_error_that_is_already_in_words_passes_through():
    """A plugin's own `DeviceError` reaches the user as it is."""
    plugins, selection = chip(lmcore_create_device=DeviceError("no such lane", hint="use lane 0"))
    with pytest.raises(DeviceError, match="no such lane"):
        create_device(plugins, selection, Config())


@pytest.mark.parametrize("hook", LISTS)
def test_a_failing_extension_is_left_out_with_a_warning(hook, caplog):
    """A plugin without a device adds to others' kernels, and takes nobody down."""
    plugins = found(
        point("chip", probe_of("chip"), **{hook: [LISTS[hook][1]]}),
        point("extra", **{hook: ValueError("extra is out of order")}),
    )
    with caplog.at_level(logging.WARNING):
        assert len(call_list(hook, plugins, select(plugins, env={}))) == 1
    assert "extra is out of order" in caplog.text
    assert hook in caplog.text


def test_an_extension_adds_kernels_and_another_device_does_not():
    """Kernels come from the chosen plugin and from those without a device."""
    fast = OpImpl("attention", "fast", "x:y")
    plugins = found(
        point("chip", probe_of("chip"), lmcore_op_impls=[fast]),
        point("rival", probe_of("rival", ABSENT), lmcore_op_impls=[replace(fast, id="rival")]),
        point("extra", lmcore_op_impls=[replace(fast, id="extra")]),
    )
    impls = op_impls(plugins, select(plugins, env={}), device_of())
    assert [(one.id, one.plugin) for one in impls] == [("fast", "chip"), ("extra", "extra")]


def test_an_extension_with_a_taken_kernel_id_is_left_out(caplog):
    """A second kernel of one id is its plugin's fault, and the first one stays."""
    fast = OpImpl("attention", "fast", "x:y")
    plugins = found(
        point("chip", probe_of("chip"), lmcore_op_impls=[fast]),
        point("extra", lmcore_op_impls=[fast]),
    )
    (impl,) = op_impls(plugins, select(plugins, env={}), device_of())
    assert impl.plugin == "chip"
    assert "`fast` of op `attention` is taken" in caplog.text


def test_the_device_must_be_one_of_the_promised_type():
    """Something else, nothing, or a device of another type is the plugin's error."""
    good = device_of()
    plugins, selection = chip(lmcore_create_device=good)
    assert create_device(plugins, selection, Config()) is good
    for answer, words in ((None, "None"), ("chip", "`str`"), (device_of("cpu"), "type `cpu`")):
        with pytest.raises(PluginError) as error:
            create_device(*chip(lmcore_create_device=answer), Config())
        assert words in error.value.what
    with pytest.raises(PluginError, match="has no `lmcore_create_device`"):
        create_device(*chip(), Config())


def test_launch_environment_leaves_the_users_variables(caplog):
    """Only what is unset is added, and a conflict is reported."""
    plugins, selection = chip(lmcore_launch_env={"A": "1", "B": "2", "C": "3"})
    with caplog.at_level(logging.INFO):
        added = launch_env(plugins, selection, {"rank": 0}, {"A": "9", "C": "3"})
    assert added == {"B": "2"}
    assert "`A=9` is kept" in caplog.text
    assert "C" not in caplog.text.replace("CHIP", "")
    assert launch_env(*chip(), {"rank": 0}, {}) == {}


@pytest.mark.parametrize("answer", [None, ["A=1"], {"A": 1}, {1: "A"}])
def test_launch_environment_must_map_strings(answer):
    """Anything else is the plugin's error."""
    with pytest.raises(PluginError, match="lmcore_launch_env"):
        launch_env(*chip(lmcore_launch_env=answer), {"rank": 0}, {})


def test_run_hooks_reach_the_run_and_only_the_end_forgives(caplog):
    """The chosen plugin's failing start stops the run; a failing end is a warning."""
    heard = []

    def hear(run):
        heard.append(run)

    plugins, selection = chip(lmcore_run_start=hear, lmcore_run_end=OSError("too late"))
    run_start(plugins, selection, {"rank": 0})
    run_end(plugins, selection, {"rank": 0, "status": "done"})
    assert heard == [{"rank": 0}]
    assert "too late" in caplog.text
    with pytest.raises(PluginError, match="lmcore_run_start"):
        run_start(*chip(lmcore_run_start=OSError("no")), {"rank": 0})


def test_doctor_checks_are_checked():
    """A list of `Check` arrives, other things are an error, and no hook means no checks."""
    check = Check("lamp", CheckStatus.OK, "on")
    plugins, _ = chip(lmcore_doctor=[check])
    assert doctor_checks(record(plugins, "chip")) == (check,)
    assert doctor_checks(record(chip()[0], "chip")) == ()
    with pytest.raises(PluginError, match="lmcore_doctor"):
        doctor_checks(record(chip(lmcore_doctor=["on"])[0], "chip"))


def test_the_op_table_has_the_users_preferences():
    """Preferences, strictness and determinism reach the table."""
    fast = OpImpl("attention", "fast", "x:y")
    sure = OpImpl("attention", "sure", "x:y", priority=1, traits=frozenset({"deterministic"}))
    plugins, selection = chip(lmcore_op_impls=[fast, sure])
    table = build_op_table(plugins, selection, device_of(), strict=True, deterministic=True)
    assert table.strict
    assert table.traits == {"deterministic"}
    table = build_op_table(
        plugins, selection, device_of(), preferences={"attention": ("sure", "fast")}
    )
    assert [one.id for one in table.candidates("attention")] == ["sure", "fast"]


def test_choices_default_to_priority_and_list_what_is_offered():
    """The error about an unknown precision or recompute policy names the device's policies."""
    low = full_precision_policy(priority=1)
    high = replace(low, name="bf16", priority=2)
    assert choose_precision([low, high], None) is high
    assert choose_precision([low, high], "fp32") is low
    with pytest.raises(ConfigError, match="`--precision fp23`") as error:
        choose_precision([low, high], "fp23")
    assert "`bf16`, `fp32`" in error.value.hint
    assert isinstance(choose_recompute([none_policy()], "none"), RecomputePolicy)
    with pytest.raises(ConfigError, match="`--recompute full`"):
        choose_recompute([none_policy()], "full")
    with pytest.raises(DeviceError, match="none of its precision policies"):
        choose_precision([], None)


def test_the_first_available_backend_is_chosen():
    """By priority among the available ones; none is an error with each reason."""
    slow = CommBackend("slow", "chip")
    fast = CommBackend("fast", "chip", priority=9)
    dead = CommBackend("dead", "chip", priority=99, available=lambda: "no cable")
    assert choose_comm_backend([slow, fast, dead]) is fast
    with pytest.raises(DeviceError) as error:
        choose_comm_backend([dead])
    assert "no cable" in error.value.why


def test_a_backend_is_chosen_by_name():
    """The named one is used whatever its priority; one that is not usable is an error."""
    slow = CommBackend("slow", "chip")
    fast = CommBackend("fast", "chip", priority=9)
    dead = CommBackend("dead", "chip", priority=99, available=lambda: "no cable")
    assert choose_comm_backend([slow, fast, dead], "slow") is slow
    with pytest.raises(DeviceError) as error:
        choose_comm_backend([slow, fast, dead], "dead")
    assert error.value.what == "`--distributed-backend dead` cannot be used on this device"
    assert error.value.why == "`dead`: no cable"
    assert error.value.hint == "leave it out: `fast` is used then"
    with pytest.raises(DeviceError) as error:
        choose_comm_backend([dead], "slow")
    assert error.value.why == "its plugin does not have it; it offers `dead`"
    assert error.value.hint == "see `lmcore doctor`"


def test_a_set_explains_why_a_plugin_is_not_there():
    """Asking for a failed plugin gives its reason."""
    failed = PluginRecord("chip", "chip", "lmcore-chip", "1", PluginState.FAILED, "cracked")
    with pytest.raises(PluginError) as error:
        PluginSet((failed,)).usable_record("chip")
    assert "cracked" in error.value.why


def test_selection_is_json_that_others_can_read():
    """The line is plain JSON with the evidence inside."""
    chosen = select(found(), env={})
    values = json.loads(chosen.to_json())
    assert values["probe"]["evidence"] == ["cpu looked at"]
    assert "\n" not in chosen.to_json()


def test_policies_are_records_of_the_contract():
    """The CPU plugin's policies are valid records, and fp32 is the default."""
    plugins = discover(env={"LMCORE_PLUGINS": ""})
    selection = select(plugins, env={})
    device = create_device(plugins, selection, Config())
    policies = precision_policies(plugins, selection, device)
    assert all(isinstance(policy, PrecisionPolicy) for policy in policies)
    assert choose_precision(policies, None).name == "fp32"
    for policy in policies:
        policy.verify(device)


def test_a_plugin_can_be_left_out_by_any_of_its_names():
    """`--plugin-off` and its variable take the entry point's name and the plugin's own."""
    points = [CPU_POINT, point("one", probe_of("one")), point("two", probe_of("two"))]
    points.append(Point("entry", plugin_of("three", probe_of("three"))))

    def states(off=(), **env):
        plugins = discover(env=env, entry_points=points, off=off)
        return {one.entry_point: (str(one.state), one.reason) for one in plugins}

    assert states(off=["one"])["one"] == ("off", "`--plugin-off` leaves it out")
    assert states(LMCORE_PLUGIN_OFF="one, two")["two"] == (
        "off",
        "`LMCORE_PLUGIN_OFF` leaves it out",
    )
    assert states(off=["three"])["entry"][0] == "off"
    assert states(off=["entry"])["entry"][0] == "off"
    assert states(off=["entry"])["one"][0] == "usable"


def test_a_plugin_that_is_off_is_not_imported():
    """Nothing of its code runs, so that one which harms can be left out."""
    bad = Point("bad", AssertionError("imported"))
    assert discover(env={}, entry_points=[CPU_POINT, bad], off=["bad"]).records[0].reason == (
        "`--plugin-off` leaves it out"
    )


@pytest.mark.parametrize("env, off", [({}, ["onee"]), ({"LMCORE_PLUGIN_OFF": "onee"}, [])])
def test_leaving_out_what_is_not_there_is_an_error(env, off):
    """A misspelt name would leave the plugin in."""
    with pytest.raises(ConfigError, match="the plugin `onee`, which is not installed") as error:
        discover(env=env, entry_points=[CPU_POINT, point("one")], off=off)
    assert "`one`" in error.value.hint
    with pytest.raises(ConfigError) as alone:
        discover(env=env, entry_points=[CPU_POINT], off=off)
    assert "the only plugin here is `cpu`" in alone.value.hint


def test_the_cpu_cannot_be_left_out():
    """It is the last resort."""
    with pytest.raises(ConfigError, match="`--plugin-off` cannot leave out the plugin `cpu`"):
        discover(env={}, entry_points=[CPU_POINT], off=["cpu"])


def test_plugins_can_be_switched_off_after_they_were_found():
    """Plugins can be left out later, as by a configuration file, which is read after discovery."""
    plugins = found(point("one", probe_of("one")))
    assert select(plugins, env={}).plugin == "one"
    assert select(plugins.without(["one"]), env={}).plugin == "cpu"


def extension(name, **hooks):
    return point(name, **hooks)


def test_extensions_add_to_the_launch_environment():
    """A plugin without a device has its variables set for whichever device is chosen."""
    plugins = found(
        point("chip", probe_of("chip"), lmcore_launch_env={"A": "1"}),
        extension("more", lmcore_launch_env={"B": "2", "A": "1"}),
    )
    assert launch_env(plugins, select(plugins, env={}), {}, {}) == {"A": "1", "B": "2"}


def test_plugins_that_disagree_about_the_environment_stop_the_run():
    """Neither wins in silence; what the user has set does."""
    plugins = found(
        point("chip", probe_of("chip"), lmcore_launch_env={"A": "1"}),
        extension("more", lmcore_launch_env={"A": "2"}),
    )
    selection = select(plugins, env={})
    with pytest.raises(PluginError, match="disagree about the environment") as error:
        launch_env(plugins, selection, {}, {})
    assert error.value.why == "`A` would be `1` for the one and `2` for the other"
    assert launch_env(plugins, selection, {}, {"A": "3"}) == {}


def test_an_extension_that_fails_leaves_the_environment_to_the_others(caplog):
    """Its variables are missing, with a warning that says why."""
    plugins = found(
        point("chip", probe_of("chip"), lmcore_launch_env={"A": "1"}),
        extension("more", lmcore_launch_env=RuntimeError("broken")),
    )
    assert launch_env(plugins, select(plugins, env={}), {}, {}) == {"A": "1"}
    assert "RuntimeError: broken" in caplog.text


def test_a_vanished_device_is_reported_with_the_probe_evidence():
    """Between the probe and the creation another process may take it, or it may drop out."""
    plugins, selection = chip(lmcore_create_device=RuntimeError("no device found"))
    with pytest.raises(PluginError) as error:
        create_device(plugins, selection, Config())
    assert "RuntimeError: no device found" in error.value.why
    assert "its probe had reported present: chip looked at" in error.value.why
    assert "lmcore doctor" in error.value.hint


@pytest.mark.parametrize("kind", [DeviceError, PluginError])
def test_a_hint_of_the_plugins_own_reaches_the_user(kind):
    """A `PluginError` too, as of `Device.from_torch`, has the fix that fits."""
    plugins, selection = chip(lmcore_create_device=kind("no `seed`", hint="pass `seed=`"))
    with pytest.raises(kind) as error:
        create_device(plugins, selection, Config())
    assert error.value.hint == "pass `seed=`"
