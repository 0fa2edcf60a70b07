"""The op table: what is bound, why, and what is refused."""

from __future__ import annotations

import json
import logging
import math

import pytest

from lmcore.accelerator import OpContext, OpImpl, OpSpec, OpTable, Reject, Tolerance
from lmcore.accelerator.op import load_target, parse_preferences
from lmcore.errors import ConfigError, PluginError

CONTEXT = OpContext("cpu", "float32", {"head_dim": 64})
SPECS = [
    OpSpec(name, f"math:{target}", "(x) -> y", name, {"float32": Tolerance(0.0, 0.0)})
    for name, target in (("root", "sqrt"), ("power", "exp"))
]


def impl(name, load="math:sin", **more):
    return OpImpl("root", name, load, plugin="chip", **more)


def table(*impls, **more):
    return OpTable(SPECS, impls, **more)


def test_without_kernels_the_reference_is_bound():
    """It is the default, and the resolution says so."""
    ops = table()
    assert ops.bind("root", CONTEXT) is math.sqrt
    (resolution,) = ops.resolutions
    assert (resolution.chosen, resolution.plugin, resolution.source) == (
        "reference", "lmcore", "reference"
    )  # fmt: skip


def test_the_highest_priority_wins_and_the_others_have_reasons():
    """Priorities decide; equal ones by id, so that every rank decides alike."""
    ops = table(impl("b"), impl("low", priority=1), impl("a", "math:cos"))
    assert ops.bind("root", CONTEXT) is math.cos
    (resolution,) = ops.resolutions
    assert (resolution.chosen, resolution.plugin, resolution.source) == ("a", "chip", "priority")
    assert [name for name, _ in resolution.rejected] == ["b", "low", "reference"]
    assert all("`a` is preferred" in reason for _, reason in resolution.rejected)


def test_what_a_kernel_rejects_goes_to_the_next():
    """`supports` sees the context, and its reason is kept."""

    def small_heads(context):
        return Reject("head_dim over 32") if context.attributes["head_dim"] > 32 else None

    ops = table(impl("small", priority=20, supports=small_heads), impl("any", "math:cos"))
    assert ops.bind("root", CONTEXT) is math.cos
    assert ("small", "head_dim over 32") in ops.resolutions[0].rejected
    assert ops.bind("root", OpContext("cpu", "float32", {"head_dim": 8})) is math.sin


@pytest.mark.parametrize("answer", [False, True, "no", KeyError("head_dim")])
def test_a_supports_that_does_not_answer_is_out_with_a_warning(answer, caplog):
    """Raising or returning anything else is the kernel's fault, and not the end of the run."""

    def supports(context):
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert table(impl("odd", supports=supports)).bind("root", CONTEXT) is math.sqrt
    assert "`odd` of op `root` (chip)" in caplog.text


def test_preferences_go_before_priorities():
    """The first of the user's list that supports the case is bound."""
    impls = [impl("fast", priority=9), impl("slow", "math:cos", priority=1)]
    ops = table(*impls, preferences={"root": ("slow",)})
    assert ops.bind("root", CONTEXT) is math.cos
    assert ops.resolutions[0].source == "preference"
    ops = table(*impls, preferences={"root": ("reference",)})
    assert ops.bind("root", CONTEXT) is math.sqrt
    assert ops.resolutions[0].source == "preference"


def test_a_reference_in_the_middle_of_a_preference_ends_it():
    """Kernels after `reference` are never reached."""
    never = impl("never", supports=lambda context: Reject("never"))
    ops = table(never, impl("late"), preferences={"root": ("never", "reference", "late")})
    assert ops.bind("root", CONTEXT) is math.sqrt
    assert dict(ops.resolutions[0].rejected)["late"] == "`reference` is preferred by --ops"


def test_a_preference_that_cannot_be_met_is_told(caplog):
    """The log names the wish, the reason and what is used."""
    never = impl("never", supports=lambda context: Reject("wrong moon"))
    table(never, impl("good"), preferences={"root": ("never",)}).bind("root", CONTEXT)
    assert "`--ops root=never` cannot be met: wrong moon; using `good`" in caplog.text
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        table(never, impl("good"), preferences={"root": ("good", "never")}).bind("root", CONTEXT)
    assert not caplog.text


@pytest.mark.parametrize(
    "preferences, words",
    [({"rot": ("a",)}, "`--ops rot=...`: unknown op"), ({"root": ("b",)}, "`--ops root=b`")],
)
def test_unknown_preferences_are_errors(preferences, words):
    """An op or kernel that does not exist is named, with the nearest one."""
    with pytest.raises(ConfigError, match="--ops") as error:
        table(impl("aa"), preferences=preferences)
    assert words in error.value.what
    assert "known:" in error.value.hint


def test_missing_packages_reject_a_kernel():
    """`requires` is looked up without importing; a dotted name with a missing parent counts."""
    ops = table(impl("needy", requires=("json", "nonesuch_1", "nonesuch_2.sub")))
    assert ops.bind("root", CONTEXT) is math.sqrt
    assert "`nonesuch_1`, `nonesuch_2.sub`, not installed" in ops.resolutions[0].rejected[0][1]


def test_traits_must_be_claimed():
    """With `--deterministic` a kernel that does not claim it is passed over."""
    sure = impl("sure", "math:cos", priority=1, traits=frozenset({"deterministic", "fused"}))
    ops = table(impl("quick", priority=9), sure, traits=["deterministic"])
    assert ops.bind("root", CONTEXT) is math.cos
    assert ("quick", "does not claim to be deterministic") in ops.resolutions[0].rejected


def test_strict_refuses_the_reference():
    """`--strict-ops` fails with each kernel's reason."""
    never = impl("never", supports=lambda context: Reject("wrong moon"))
    with pytest.raises(ConfigError, match="`--strict-ops`") as error:
        table(never, strict=True).bind("root", CONTEXT)
    assert "never: wrong moon" in error.value.why
    with pytest.raises(ConfigError) as error:
        table(strict=True).bind("root", CONTEXT)
    assert "no plugin brings one" in error.value.why
    assert table(impl("good"), strict=True).bind("root", CONTEXT) is math.sin


def test_ids_are_unique_and_ops_known():
    """A taken id, the id of the reference and an unknown op are the plugin's errors."""
    with pytest.raises(PluginError, match="`a` of op `root` is taken"):
        table(impl("a"), impl("a"))
    with pytest.raises(PluginError, match="`reference` of op `root` is taken") as error:
        table(impl("reference"))
    assert "`lmcore` and `chip`" in error.value.why
    with pytest.raises(PluginError, match="unknown op `rot`") as error:
        table(OpImpl("rot", "a", "math:sin", plugin="chip"))
    assert "did you mean `root`" in error.value.hint


@pytest.mark.parametrize(
    "target", ["nonesuch:x", "math:nonesuch", "math", "", "math:pi", ":sin", "math:"]
)
def test_a_target_that_cannot_be_loaded_names_plugin_op_and_a_way_out(target):
    """Binding fails before training, with the root cause."""
    with pytest.raises(PluginError, match="kernel `bad` of op `root`") as error:
        table(impl("bad", target)).bind("root", CONTEXT)
    assert "plugin `chip`" in error.value.why
    assert "--ops root=reference" in error.value.hint


def test_a_module_that_raises_anything_at_import_is_a_plugin_error(tmp_path, monkeypatch):
    """A library that does not load raises OSError, which is as fatal to a kernel."""
    (tmp_path / "kernel_that_raises.py").write_text('raise OSError("libk.so.1")', encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="kernel_that_raises:f") as error:
        load_target("kernel_that_raises:f")
    assert "OSError: libk.so.1" in error.value.why


def test_resolve_loads_nothing():
    """Explaining a choice must not import it."""
    resolution = table(impl("bad", "nonesuch:x")).resolve("root", CONTEXT)
    assert resolution.chosen == "bad"


def test_one_case_is_reported_once_and_as_json():
    """Binding the same case for each layer leaves one resolution."""
    ops = table(impl("a"))
    for _ in range(3):
        ops.bind("root", CONTEXT)
    (resolution,) = ops.resolutions
    assert json.loads(json.dumps(resolution.to_dict())) == {
        "op": "root", "chosen": "a", "plugin": "chip", "source": "priority",
        "rejected": [{"id": "reference", "reason": "`a` is preferred"}],
        "device_type": "cpu", "dtype": "float32", "attributes": {"head_dim": 64},
    }  # fmt: skip


def test_the_fingerprint_is_that_of_the_choices():
    """Equal for equal choices in any order of binding, different for others."""
    first, second, third = table(impl("a")), table(impl("a")), table()
    for ops, order in (
        (first, ("root", "power")),
        (second, ("power", "root")),
        (third, ("root", "power")),
    ):
        for op in order:
            ops.bind(op, CONTEXT)
    assert first.fingerprint() == second.fingerprint() != third.fingerprint()


def test_preferences_are_parsed():
    """`op=id,id` with blanks forgiven."""
    assert parse_preferences(["root=a, b", "power=reference"]) == {
        "root": ("a", "b"), "power": ("reference",)
    }  # fmt: skip


@pytest.mark.parametrize("entries", [["root"], ["root="], ["=a"], ["root=,"], ["root=a", "root=b"]])
def test_garbled_preferences_are_errors(entries):
    """What is no preference is shown as typed."""
    with pytest.raises(ConfigError, match="--ops"):
        parse_preferences(entries)
