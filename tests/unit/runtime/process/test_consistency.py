"""Values that ranks must have in common, and messages about differences."""

from __future__ import annotations

import dataclasses
import types

import pytest

from lmcore.base.errors import DeviceError, RunError
from lmcore.contract import (
    OP_SPECS,
    OpContext,
    OpImpl,
    OpTable,
    Probe,
    ProbeState,
    Reject,
)
from lmcore.plugin import PluginRecord, PluginSet, PluginState, Selection
from lmcore.runtime.process.consistency import (
    check_device,
    check_equal,
    check_kernels,
    check_versions,
)

PROBE = Probe("chip", ProbeState.PRESENT, 2, evidence=("two chips on the bus",))
CHIP = PluginRecord("chip", "chip", "lmcore-chip", "1.0", PluginState.USABLE, probe=PROBE)
EXTRA = PluginRecord("extra", "extra", "lmcore-extra", "3.1", PluginState.USABLE)
SELECTION = Selection("chip", "lmcore-chip", "1.0", PROBE, "its device is present")


def all_raise(found, kind):
    """Return the one text that every rank raises."""
    assert all(type(one) is kind for one in found), found
    (text,) = {str(one) for one in found}
    return text


@pytest.mark.parametrize("value", [1, "text", None, {"a": [1, 2]}])
def test_equal_values_agree(ranks, value):
    """Nothing happens."""
    assert ranks(lambda rendezvous: check_equal(rendezvous, "a number", value), 3) == [None] * 3


def test_a_difference_is_shown_on_every_rank_and_folded(ranks):
    """Ranks with the same value share one line."""

    def body(rendezvous):
        check_equal(rendezvous, "the answer", 42 if rendezvous.rank.rank != 2 else "none")

    text = all_raise(ranks(body, 4), RunError)
    assert text.splitlines()[:3] == [
        "the processes of this run differ in the answer",
        "why: ranks 0-1, 3: 42",
        "     rank 2: none",
    ]


def test_of_mappings_only_what_differs_is_shown(ranks):
    """A key that a rank lacks is a difference as well."""

    def body(rendezvous):
        own = {"same": 1, "colour": "red"} | ({"more": 2} if rendezvous.rank.rank else {})
        check_equal(rendezvous, "settings", own)

    text = all_raise(ranks(body), RunError)
    assert "why: more:\n       rank 0: none\n       rank 1: 2" in text
    assert "colour" not in text


def test_long_values_and_many_differences_are_cut(ranks):
    """The message stays readable."""

    def body(rendezvous):
        rank = rendezvous.rank.rank
        check_equal(rendezvous, "settings", {f"key {n}": f"{rank}" * 1000 for n in range(9)})

    text = all_raise(ranks(body), RunError)
    assert "and 4 more" in text
    assert len(text) < 5000


def test_ranks_that_see_the_launchers_device_agree(ranks):
    """Hosts may differ in what they have besides, such as serial numbers."""

    def body(rendezvous):
        evidence = (f"chip number {rendezvous.rank.rank}",)
        probe = dataclasses.replace(PROBE, evidence=evidence)
        here = PluginSet((dataclasses.replace(CHIP, probe=probe),))
        check_device(rendezvous, dataclasses.replace(SELECTION, probe=probe), here)

    assert ranks(body) == [None, None]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "2.0"}, "lmcore-chip 2.0) present"),
        (
            {"probe": Probe("chip", ProbeState.ABSENT, evidence=("the bus is empty",))},
            "here: the bus is empty",
        ),
        ({"state": PluginState.FAILED, "reason": "libchip.so is missing"}, "libchip.so is missing"),
        ({"name": "chap"}, "it is not installed here"),
    ],
)
def test_a_rank_that_would_choose_otherwise_stops_all_with_both_evidences(ranks, change, words):
    """Every rank says which one, what the launcher saw, and what that rank sees."""

    def body(rendezvous):
        here = dataclasses.replace(CHIP, **(change if rendezvous.rank.rank == 1 else {}))
        check_device(rendezvous, SELECTION, PluginSet((here,)))

    text = all_raise(ranks(body), DeviceError)
    assert text.startswith("rank 1 cannot use device `chip`, which the launcher chose\nwhy: rank 1")
    assert words in text
    if "here:" in text:
        assert "launcher: two chips on the bus" in text


def test_ranks_that_chose_by_themselves_and_differently_stop(ranks):
    """Without a common launcher each one's choice and evidence are shown."""

    def body(rendezvous):
        if rendezvous.rank.rank == 1:
            probe = Probe("cpu", ProbeState.PRESENT, 1, 0, ("eight cores",))
            own = PluginRecord("cpu", "cpu", "lmcore", "1", PluginState.USABLE, probe=probe)
            chosen = Selection("cpu", "lmcore", "1", probe, "nothing else is there")
            check_device(rendezvous, chosen, PluginSet((own,)))
        else:
            check_device(rendezvous, SELECTION, PluginSet((CHIP,)))

    text = all_raise(ranks(body), DeviceError)
    assert text.startswith("the processes of this run use different devices")
    assert "rank 0: `chip` of plugin chip (lmcore-chip 1.0)\n       two chips on the bus" in text
    assert "rank 1: `cpu` of plugin cpu (lmcore 1)\n       eight cores" in text


def test_versions_of_the_runs_software_are_compared(ranks):
    """An extension counts, a plugin that takes no part does not."""

    def body(rendezvous):
        second = rendezvous.rank.rank == 1
        extra = dataclasses.replace(EXTRA, version="3.2" if second else "3.1")
        idle = dataclasses.replace(CHIP, name="idle", version="9" if second else "8")
        check_versions(rendezvous, SELECTION, PluginSet((CHIP, extra, idle)))

    text = all_raise(ranks(body), RunError)
    assert "plugin extra:\n       rank 0: lmcore-extra 3.1\n       rank 1: lmcore-extra 3.2" in text
    assert "idle" not in text


def test_equal_versions_agree(ranks):
    """Nothing happens."""
    plugins = PluginSet((CHIP, EXTRA))
    assert ranks(lambda one: check_versions(one, SELECTION, plugins)) == [None, None]


def _table(*, supports=True, case=8):
    def verdict(context):
        return None if supports else Reject("its library is /opt/chip/lib of this host")

    fast = OpImpl("attention", "fast", "lmcore.contract.op.reference:attention", supports=verdict)
    table = OpTable(OP_SPECS, [fast])
    table.bind("attention", OpContext("cpu", "float32", {"head_dim": case}))
    table.bind("layer_norm", OpContext("cpu", "float32"))
    return table


def test_equal_kernels_agree_by_their_fingerprint(ranks):
    """The choices themselves do not travel."""

    def body(rendezvous):
        quiet = types.SimpleNamespace(fingerprint=_table().fingerprint)
        check_kernels(rendezvous, quiet)

    assert ranks(body) == [None, None]


def test_a_kernel_that_differs_is_named(ranks):
    """With its case, and what each rank runs and why; ops that are alike are left out."""

    def body(rendezvous):
        check_kernels(rendezvous, _table(supports=rendezvous.rank.rank != 1))

    text = all_raise(ranks(body, 3), RunError)
    assert "differ in the kernels that their model runs" in text
    assert "op `attention` (cpu, float32, head_dim 8):" in text
    assert "  ranks 0, 2: `fast` of ``; not `reference`: " in text
    assert "  rank 1: `reference` of `lmcore`; not `fast`: its library is /opt/chip" in text
    assert "layer_norm" not in text


def test_an_op_that_only_some_ranks_use_is_a_difference(ranks):
    """A model of another shape has other cases."""

    def body(rendezvous):
        check_kernels(rendezvous, _table(case=8 if rendezvous.rank.rank else 16))

    text = all_raise(ranks(body), RunError)
    assert "head_dim 16):\n       rank 0: `fast`" in text
    assert "  rank 1: not used" in text
