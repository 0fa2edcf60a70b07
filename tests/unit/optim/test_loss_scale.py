"""The dynamics of the loss scale, against the reference's vectors and torch's own scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.config.load import load_config
from lmcore.contract.precision.policy import autocast_policy, full_precision_policy
from lmcore.optim.loss_scale import DynamicLossScale, FixedLossScale, LossScale, loss_scale_of


def scales(scale: LossScale, overflows: str) -> list[float]:
    """Return the scale after each step; `x` is one that overflows."""
    found = []
    for one in overflows:
        assert scale.update(overflow=one == "x")
        found.append(scale.value)
    return found


def test_the_first_steps_of_a_run() -> None:
    """Skipped steps from the start leave 2^32, 2^31, 2^30: the hysteresis spares the first."""
    assert scales(DynamicLossScale(), "xxx") == [2.0**32, 2.0**31, 2.0**30]


def test_growth_after_the_window() -> None:
    """A thousand good steps double the scale; the count begins again with an overflow."""
    scale = DynamicLossScale(2.0**16)
    assert scales(scale, "." * 1000)[-2:] == [2.0**16, 2.0**17]
    assert scales(scale, "." * 999 + "x" + "." * 999)[-1] == 2.0**17
    assert scales(scale, ".") == [2.0**18]


def test_hysteresis_refills_by_growth_alone() -> None:
    """Good steps between overflows do not bring tolerance back; growing does."""
    scale = DynamicLossScale(64.0, window=4, hysteresis=3)
    assert scales(scale, "x..x..x...x") == [64] * 6 + [32] * 4 + [16]
    assert scales(scale, "....") == [16, 16, 16, 32]
    assert scales(scale, "xxx") == [32, 32, 16]


def test_against_torchs_scaler() -> None:
    """With a hysteresis of 1 the dynamics match `torch.amp.GradScaler`."""
    generator = torch.Generator().manual_seed(5)
    bad = (torch.rand(400, generator=generator) < 0.2).tolist()
    ours = DynamicLossScale(2.0**20, minimum=2.0**-60, window=3, hysteresis=1)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in bad:
        theirs.scale(torch.ones(1))
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=overflow)
        assert ours.value == theirs.get_scale()


def test_the_lowest_scale() -> None:
    """Halving stops at the minimum; an overflow that finds the scale there ends the run."""
    scale = DynamicLossScale(6.0, minimum=2.0, hysteresis=1)
    assert scales(scale, "xx") == [3.0, 2.0]
    assert not scale.update(overflow=True)
    assert scale.value == 2.0
    assert scale.limit == "the loss scale is at its lowest, 2 (`--min-loss-scale`)"


def test_the_hysteresis_holds_at_the_lowest_scale_too() -> None:
    """At the lowest scale the first overflow is still tolerated."""
    scale = DynamicLossScale(1.0)
    assert scale.update(overflow=True)
    assert not scale.update(overflow=True)


def test_a_fixed_scale() -> None:
    """It never changes; so many skipped steps in a row end the run, and any good one forgives."""
    scale = FixedLossScale(1024.0, patience=3)
    assert scales(scale, "xxx.xxx") == [1024.0] * 7
    assert not scale.update(overflow=True)
    assert "`--loss-scale 1024`" in scale.limit


def test_without_a_scale() -> None:
    """Without a loss scale, the first step that is not finite is an error."""
    scale = FixedLossScale()
    assert scale.update(overflow=False)
    assert not scale.update(overflow=True)
    assert (scale.value, scale.limit, scale.state()) == (1.0, "", {})


@pytest.mark.parametrize("cut", [0, 1, 3, 7, 12])
def test_continued(cut: int) -> None:
    """A scale that is restored continues as the one that was saved."""
    steps = "x..x....x.xx..."

    def fresh() -> DynamicLossScale:
        return DynamicLossScale(256.0, window=3, hysteresis=2)

    whole = fresh()
    wanted = scales(whole, steps)
    first, second = fresh(), fresh()
    scales(first, steps[:cut])
    second.restore(first.state())
    assert scales(second, steps[cut:]) == wanted[cut:]
    assert second.state() == whole.state()


def test_continued_with_other_settings() -> None:
    """Settings of the new run hold: a shorter window or hysteresis, a higher minimum."""
    before = DynamicLossScale(64.0, window=1000, hysteresis=5)
    scales(before, "." * 500)
    after = DynamicLossScale(1.0, minimum=128.0, window=10, hysteresis=2)
    after.restore(before.state())
    assert after.value == 128.0
    assert scales(after, ".") == [256.0]
    assert scales(after, "xx") == [256.0, 128.0]


def test_from_a_run_without_one() -> None:
    """Nothing is restored from a checkpoint that had no loss scale, or a fixed one."""
    scale = DynamicLossScale()
    scale.restore({})
    scale.restore(FixedLossScale(8.0, patience=3).state())
    assert scale == DynamicLossScale()
    fixed = FixedLossScale(8.0, patience=3)
    fixed.restore(DynamicLossScale().state())
    assert fixed == FixedLossScale(8.0, patience=3)


@pytest.mark.parametrize(
    "change",
    [
        *({"value": bad} for bad in (0.0, -1.0, float("nan"), float("inf"), "2", None)),
        *({"good_steps": bad} for bad in (-1, 1.5, True, None)),
        {"tolerance": "2"},
    ],
)
def test_damaged_state(change: dict[str, Any]) -> None:
    """Numbers that no run can have left are refused."""
    with pytest.raises(CheckpointError, match="the checkpoint's loss scale has"):
        DynamicLossScale().restore(DynamicLossScale().state() | change)


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("", DynamicLossScale(2.0**32, 1.0, 1000, 2)),
        ("--loss-scale 0", DynamicLossScale()),
        (
            "--initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 4",
            DynamicLossScale(65536.0, 2.0, 500, 4),
        ),
        ("--loss-scale 4096", FixedLossScale(4096.0, patience=50)),
    ],
)
def test_from_options(flags: str, wanted: LossScale, accelerator: Any) -> None:
    """The options make the scale where the precision needs one, and only there."""
    asked = load_config(flags.split()).config.accelerator
    policy = autocast_policy(accelerator, name="fp16", compute="float16", loss_scaling=True)
    assert loss_scale_of(asked, policy) == wanted
    assert loss_scale_of(asked, full_precision_policy()) == FixedLossScale()


@pytest.fixture
def accelerator() -> Any:
    """The CPU."""
    from lmcore_cpu.device import create_device

    return create_device()
