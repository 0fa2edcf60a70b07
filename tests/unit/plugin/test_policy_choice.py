"""Choice of a run's policy: by name, by priority, and refusals with their reasons."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DeviceError, PluginError
from lmcore.contract import (
    CheckpointStager,
    PrecisionPolicy,
    full_policy,
    full_precision_policy,
    none_policy,
)
from lmcore.plugin import choose_precision, choose_recompute, choose_stager, fastest_precision


def precision(name: str, priority: int = 0, reason: str | None = None) -> PrecisionPolicy:
    """Return a policy that is available unless there is a reason."""
    names = (name, "float32", "float32", "float32")
    return PrecisionPolicy(*names, nullcontext, priority=priority, available=lambda: reason)


def stager(
    name: str, priority: int = 0, reason: str | None = None, *, copies: bool = True
) -> CheckpointStager:
    """Return a stager that is available unless there is a reason."""
    return CheckpointStager(name, dict, priority, lambda: reason, copies)


def test_default_precision() -> None:
    """The default is the available policy of the highest priority; unavailable ones are skipped."""
    low, high = precision("low", 1), precision("high", 2)
    best = precision("best", 3, "it has no such units")
    assert choose_precision([low, best, high], None) is high
    assert choose_precision([high, low, precision("also low", 1)], None) is high


def test_no_precision() -> None:
    """A device that can run none says the reason of each."""
    with pytest.raises(DeviceError, match="none of its precision policies") as caught:
        choose_precision([precision("a", 1, "too old"), precision("b", 2, "too new")], None)
    assert caught.value.why == "`a`: too old\n`b`: too new"
    with pytest.raises(DeviceError) as caught:
        choose_precision([], None)
    assert caught.value.why == "its plugin offers none"


HALVES = (
    PrecisionPolicy("fp32", "float32", "float32", "float32", nullcontext, priority=9),
    PrecisionPolicy("bf16", "bfloat16", "float32", "float32", nullcontext),
    PrecisionPolicy("pure", "bfloat16", "bfloat16", "float32", nullcontext, priority=2),
    PrecisionPolicy("fp16", "float16", "float32", "float32", nullcontext, loss_scaling=True),
)


@pytest.mark.parametrize(
    "rates, chosen",
    [
        ({"float32": 100.0, "bfloat16": 125.0}, "bf16"),
        ({"float32": 100.0, "bfloat16": 120.0, "float16": 900.0}, "fp32"),
        ({"float32": 100.0, "bfloat16": None}, "fp32"),
        ({"float32": None, "bfloat16": 100.0}, "fp32"),
    ],
)
def test_the_fastest_precision(rates: dict[str, float | None], chosen: str) -> None:
    """It is bf16 if the device multiplies it faster; weights are kept as by the default."""
    device: Any = SimpleNamespace(peak_flops=rates.get, missing={})
    policy, why = fastest_precision(HALVES, device)
    assert policy.name == chosen
    assert ("1.2 times as fast as those in float32" in why) == (chosen == "bf16")


def test_the_fastest_precision_without_a_peak_or_without_bf16() -> None:
    """The default is taken, and the reason is the device's."""
    device: Any = SimpleNamespace(peak_flops=None, missing={"peak_flops": "nobody knows it"})
    policy, why = fastest_precision(HALVES, device)
    assert (policy.name, why) == ("fp32", "the device's default, since nobody knows it")
    device = SimpleNamespace(peak_flops={"float32": 1.0, "bfloat16": 9.0}.get, missing={})
    lacking = replace(HALVES[1], available=lambda: "not here")
    assert fastest_precision([HALVES[0], lacking, HALVES[3]], device)[0].name == "fp32"


def test_tie() -> None:
    """Two defaults are an error that lists both, unless one is named."""
    both = [precision("a", 5), precision("b", 5)]
    with pytest.raises(PluginError, match="`a` and `b` have the same priority, 5") as caught:
        choose_precision(both, None)
    assert "--precision" in str(caught.value.hint)
    assert choose_precision(both, "b") is both[1]


def test_unknown_name() -> None:
    """The error lists what the device can run, and why it cannot run the rest."""
    offered = [precision("bf16"), precision("fp32"), precision("fp8", 0, "no such units")]
    with pytest.raises(ConfigError, match="`--precision fp31`: the device does not") as caught:
        choose_precision(offered, "fp31")
    assert caught.value.hint == "did you mean `fp32`? known: `auto`, `bf16`, `fp32`"
    assert caught.value.why == "`fp8`: no such units"


def test_unavailable_name() -> None:
    """Asking for what the device cannot run gives the reason, and what it can run."""
    cannot = replace(full_policy(), name="offload", available=lambda: "there is no host memory")
    with pytest.raises(ConfigError, match="`--recompute offload`: the device cannot") as caught:
        choose_recompute([none_policy(), cannot, full_policy()], "offload")
    assert caught.value.why == "there is no host memory"
    assert "`full`, `none`" in str(caught.value.hint)


def test_an_availability_that_fails() -> None:
    """A policy whose question fails is not available, for that reason."""

    def ask() -> str:
        raise DeviceError("the driver does not answer")

    failing = replace(full_precision_policy(), name="fp8", priority=900, available=ask)
    assert choose_precision([failing, full_precision_policy()], None).name == "fp32"
    with pytest.raises(ConfigError) as caught:
        choose_precision([failing], "fp8")
    assert caught.value.why == "the driver does not answer"


@pytest.mark.parametrize(
    "copies, wanted", [(False, "live"), (True, "buffers")], ids=["waiting", "going on"]
)
def test_stager(copies: bool, wanted: str) -> None:
    """The live tensors are written only while training waits."""
    offered = [
        stager("plain", 1),
        stager("live", 9, copies=False),
        stager("buffers", 5),
        stager("magic", 99, "no wand"),
    ]
    assert choose_stager(offered, copies=copies).name == wanted


@pytest.mark.parametrize(
    "offered", [[], [stager("live", copies=False)], [stager("magic", 1, "no wand")]]
)
def test_the_cores_own_stager(offered: list[Any]) -> None:
    """Without a fitting stager of a plugin, the core copies to the host."""
    assert choose_stager(offered, copies=True).name == "host-copy"


def test_tied_stagers() -> None:
    """Two stagers of the highest priority are an error that lists both."""
    with pytest.raises(PluginError, match="`a` and `b` have the same priority"):
        choose_stager([stager("a"), stager("b")], copies=True)
