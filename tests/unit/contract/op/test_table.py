"""The op table: what is bound, why, and what is refused."""

from __future__ import annotations

import json
import logging
import math

import pytest

from lmcore.base.errors import ConfigError, PluginError
from lmcore.contract import OpContext, OpImpl, OpSpec, OpTable, Reject, Tolerance

CONTEXT = OpContext("cpu", "float32", {"head_dim": 64})
SPECS = [
    OpSpec(
        name,
        f"math:{target}",
        "(x) -> y",
        name,
        {"float32": Tolerance(0.0, 0.0)},
        attributes=("head_dim", "causal"),
    )
    for name, target in (("root", "sqrt"), ("power", "exp"))
]


def impl(name, load="math:sin", **more):
    return OpImpl(**{"op": "root", "id": name, "load": load, "plugin": "chip", **more})


def table(*impls, **more):
    return OpTable(SPECS, impls, **more)


def bound(ops, *cases):
    for op, context in cases:
        ops.bind(op, context)
    return ops


def test_without_kernels_the_reference_is_bound():
    """It is the default, and the resolution says so."""
    ops = table()
    assert ops.bind("root", CONTEXT) is math.sqrt
    (resolution,) = ops.resolutions
    assert (resolution.chosen, resolution.plugin, resolution.source) == (
        "reference", "lmcore", "reference"
    )  # fmt: skip


def test_the_highest_priority_wins_and_the_others_have_reasons():
    """Priorities decide, and each other kernel's reason names both."""
    ops = table(impl("low", priority=1), impl("a", "math:cos"))
    assert ops.bind("root", CONTEXT) is math.cos
    (resolution,) = ops.resolutions
    assert (resolution.chosen, resolution.plugin, resolution.source) == ("a", "chip", "priority")
    assert resolution.rejected == (
        ("low", "`a` has priority 10, this 1"),
        ("reference", "`a` supports the case"),
    )


@pytest.mark.parametrize(
    "plugins, chosen, why",
    [
        (("chip", "chip", "chip"), "a", "its id comes first"),
        (("alpha", "chip", "beta"), "b", "plugin `chip` brings the device"),
        (("delta", "gamma", "beta"), "c", "plugin `beta` comes before"),
    ],
)
def test_equal_priorities_are_decided_and_said(plugins, chosen, why):
    """The device's own plugin goes first, then plugins and ids by name, in whatever order."""
    impls = [impl(name, plugin=plugin) for name, plugin in zip("abc", plugins, strict=True)]
    for offered in (impls, impls[::-1]):
        resolution = table(*offered, device_plugin="chip").resolve("root", CONTEXT)
        assert (resolution.chosen, resolution.source) == (chosen, "tie")
        others = [(name, reason) for name, reason in resolution.rejected if name != "reference"]
        assert len(others) == 2
        for _, reason in others:
            assert f"`{chosen}` has the same priority, 10, and goes first" in reason
        assert any(why in reason for _, reason in others)


def test_no_tie_where_the_other_does_not_do_the_case():
    """A kernel of the same priority that rejects the case, or that is not wanted, is no rival."""
    never = impl("b", supports=lambda context: Reject("wrong moon"))
    resolution = table(impl("a"), never).resolve("root", CONTEXT)
    assert resolution.source == "priority"
    assert ("b", "wrong moon") in resolution.rejected
    resolution = table(impl("a"), impl("b"), preferences={"root": ("b",)}).resolve("root", CONTEXT)
    assert (resolution.chosen, resolution.source) == ("b", "preference")
    assert ("a", "`b` is preferred by --ops") in resolution.rejected


def test_a_kernel_of_lower_rank_says_its_own_reason():
    """A kernel that does not support the case is listed with its own reason."""
    never = impl("low", priority=1, supports=lambda context: Reject("wrong moon"))
    resolution = table(impl("a"), never).resolve("root", CONTEXT)
    assert ("low", "wrong moon") in resolution.rejected


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


def test_a_reject_is_one_whatever_its_reason():
    """A kernel that rejects a case without words is not bound."""
    ops = table(impl("mute", supports=lambda context: Reject(None)))
    assert ops.bind("root", CONTEXT) is math.sqrt


def test_a_supports_that_needs_what_the_case_leaves_open_says_so(caplog):
    """Asking for an attribute that is not given is no fault, and the answer names it."""

    def supports(context):
        return None if context.attributes["causal"] else Reject("not causal")

    ops = table(impl("curious", supports=supports))
    resolution = ops.resolve("root", CONTEXT)
    assert resolution.rejected == (("curious", "asks for `causal`, which is not given"),)
    assert not caplog.text
    undeclared = table(impl("odd", supports=lambda context: context.attributes["moon"]))
    assert "raised KeyError" in undeclared.resolve("root", CONTEXT).rejected[0][1]
    assert "`odd`" in caplog.text


def test_a_case_has_no_attribute_that_the_op_does_not_declare():
    """An attribute that the op does not declare is refused, also from the core."""
    with pytest.raises(AssertionError, match="moon"):
        table().resolve("root", OpContext("cpu", "float32", {"moon": 1}))


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


def test_a_preference_that_cannot_be_met_is_reported(caplog):
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
    """`--strict-ops` fails with each kernel's reason, each time."""
    never = impl("never", supports=lambda context: Reject("wrong moon"))
    ops = table(never, strict=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="`--strict-ops`: op `root` has") as error:
            ops.bind("root", CONTEXT)
        assert error.value.why == "root (cpu, float32): `never`: wrong moon"
    with pytest.raises(ConfigError) as error:
        table(strict=True).bind("root", CONTEXT)
    assert "no plugin brings one" in error.value.why
    assert table(impl("good"), strict=True).bind("root", CONTEXT) is math.sin


def test_strict_names_all_ops_at_once():
    """Within `bind_all` the failure waits for the end, and says every op and case."""
    ops = table(impl("good", op="power"), strict=True)
    after = []

    def build():
        with ops.bind_all():
            assert ops.bind("root", CONTEXT) is math.sqrt
            with ops.bind_all():
                ops.bind("root", OpContext("cpu", "bfloat16"))
            bound(ops, ("power", CONTEXT))
            after.append("reached")

    with pytest.raises(ConfigError, match="op `root` has") as error:
        build()
    assert after == ["reached"]
    assert error.value.why.splitlines() == [
        "root (cpu, float32): no plugin brings one",
        "root (cpu, bfloat16): no plugin brings one",
    ]
    ops = table(strict=True)
    with pytest.raises(ConfigError, match="ops `root`, `power` have"), ops.bind_all():
        bound(ops, ("root", CONTEXT), ("power", CONTEXT))


def test_bind_all_lets_another_error_pass():
    """An error of the building itself is not hidden behind, or mixed with, the strict one."""
    ops = table(strict=True)

    def build():
        with ops.bind_all():
            ops.bind("root", CONTEXT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    with ops.bind_all():
        pass  # nothing was bound here, so there is nothing to raise
    with pytest.raises(ConfigError, match="`--strict-ops`"):
        ops.bind("root", CONTEXT)


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


def test_a_malformed_kernel_is_its_plugins_error():
    """Plugin, kernel and field are named."""
    with pytest.raises(PluginError, match="plugin `chip` brings a malformed kernel `a`") as error:
        table(impl("a", priority="high"))
    assert "`priority` is 'high'" in error.value.why


@pytest.mark.parametrize(
    "target", ["nonesuch:x", "math:nonesuch", "math", "", "math:pi", ":sin", "math:"]
)
def test_a_target_that_cannot_be_loaded_names_plugin_op_and_a_way_out(target):
    """Binding fails before training, with the root cause."""
    with pytest.raises(PluginError, match="kernel `bad` of op `root`") as error:
        table(impl("bad", target)).bind("root", CONTEXT)
    assert "plugin `chip`" in error.value.why
    assert "--ops root=reference" in error.value.hint


def kernels_module(tmp_path, monkeypatch):
    """Write a module of kernels; return its name."""
    text = "def good(x): return x\ndef two(x, y): return x\ndef other(*, x): return x\n"
    (tmp_path / "kernels_of_a_test.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "kernels_of_a_test"


@pytest.mark.parametrize("device_plugin", ["", "chip"])
@pytest.mark.parametrize("function", ["two", "other"])
def test_a_kernel_that_takes_other_arguments_is_refused(
    function, device_plugin, tmp_path, monkeypatch
):
    """A wrong signature is found when the model is built and not in the first step."""
    target = f"{kernels_module(tmp_path, monkeypatch)}:{function}"
    ops = table(impl("bad", target), device_plugin=device_plugin)
    with pytest.raises(PluginError, match="kernel `bad` of op `root` cannot be used") as error:
        ops.bind("root", CONTEXT)
    assert "plugin `chip`" in error.value.why
    assert f"`{target}` cannot be called as the op is: it " in error.value.why
    assert "--ops root=reference" in error.value.hint


@pytest.mark.parametrize("target", ["nonesuch:x", "kernels_of_a_test:two", "math:pi"])
def test_an_extensions_kernel_that_cannot_be_used_gives_way(target, tmp_path, monkeypatch, caplog):
    """It is passed over with the reason and one warning, and the next one is bound."""
    kernels_module(tmp_path, monkeypatch)
    bad = impl("bad", target, plugin="addition", priority=20)
    ops = table(bad, impl("good", "math:cos"), device_plugin="chip")
    assert ops.bind("root", CONTEXT) is math.cos
    assert ops.bind("root", OpContext("cpu", "bfloat16")) is math.cos
    for resolution in ops.resolutions:
        assert (resolution.chosen, resolution.source) == ("good", "priority")
        reason = dict(resolution.rejected)["bad"]
        assert reason.startswith("cannot be used: ")
        assert target in reason
    assert len(caplog.records) == 1
    assert "kernel `bad` of op `root` (addition)" in caplog.text


def test_an_extensions_kernel_gives_way_to_the_reference(caplog):
    """Without another kernel the core's reference is used; `--strict-ops` refuses it."""
    bad = impl("bad", "nonesuch:x", plugin="addition")
    assert table(bad, device_plugin="chip").bind("root", CONTEXT) is math.sqrt
    with pytest.raises(ConfigError, match="`--strict-ops`") as error:
        table(bad, device_plugin="chip", strict=True).bind("root", CONTEXT)
    assert "`bad`: cannot be used: " in error.value.why
    assert "nonesuch" in caplog.text


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
        "rejected": [{"id": "reference", "reason": "`a` supports the case"}],
        "device_type": "cpu", "dtype": "float32", "attributes": {"head_dim": 64},
    }  # fmt: skip


def test_the_fingerprint_is_that_of_the_choices():
    """Equal for equal choices in any order of binding, different for others."""
    cases = [("root", CONTEXT), ("power", CONTEXT), ("root", OpContext("cpu", "bfloat16"))]
    base = bound(table(impl("a")), *cases).fingerprint()
    assert bound(table(impl("a")), *cases[::-1], *cases).fingerprint() == base
    assert bound(table(), *cases).fingerprint() != base
    assert bound(table(impl("a", plugin="other")), *cases).fingerprint() != base
    assert bound(table(impl("a")), *cases[:2]).fingerprint() != base


def test_the_fingerprint_leaves_out_what_may_differ_between_ranks():
    """Order of attributes and kernels, and words of a reason such as a path, do not count."""
    fingerprints = set()
    for host, attributes in (
        ("one", {"head_dim": 8, "causal": True}),
        ("two", {"causal": True, "head_dim": 8}),
    ):
        never = impl("z", supports=lambda context, host=host: Reject(f"no /{host}/library"))
        impls = [impl("a"), never, impl("low", priority=1)]
        ops = table(*(impls if host == "one" else impls[::-1]))
        fingerprints.add(
            bound(ops, ("root", OpContext("cpu", "float32", attributes))).fingerprint()
        )
    assert len(fingerprints) == 1


def test_the_table_as_json():
    """`kernels.json` has the wishes, the fingerprint and every resolution."""
    ops = table(impl("a"), impl("b"), preferences={"root": ("b",)}, traits=["deterministic"])
    bound(ops, ("root", CONTEXT), ("power", CONTEXT))
    kept = json.loads(json.dumps(ops.to_dict()))
    assert kept["fingerprint"] == ops.fingerprint()
    assert (kept["strict"], kept["traits"]) == (False, ["deterministic"])
    assert kept["preferences"] == {"root": ["b"]}
    assert [one["op"] for one in kept["ops"]] == ["root", "power"]
    assert ops.choices() == {
        '["root", "cpu", "float32", {"head_dim": 64}]': "lmcore:reference",
        '["power", "cpu", "float32", {"head_dim": 64}]': "lmcore:reference",
    }
