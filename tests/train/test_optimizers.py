"""Every optimizer in whole runs: the loss falls, and a run that continues is the unbroken one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmcore.config.optimizers import OPTIMIZERS
from lmcore.contract.torch_versions import MUON

RATES = {
    "adam": "1e-2",
    "sgd": "3e-1",
    "lamb": "3e-2",
    "muon": "1e-2",
    "sophia": "3e-3",
    "adopt": "1e-2",
    "shampoo": "1e-2",
    "schedulefree": "2e-2",
    "adam8bit": "1e-2",
    "torch.optim:NAdam": "1e-2",
}
"""Learning rates at which the tiny model learns."""

MORE = {
    "sophia": "--sophiag-hessian-interval 3",
    "shampoo": "--shampoo-precondition-frequency 3 --shampoo-max-preconditioner-dim 24",
}
"""So that few steps meet every branch."""


def flags(optimizer: str) -> str:
    return (
        f"--optimizer {optimizer} --lr {RATES[optimizer]} --lr-decay-style constant "
        f"--train-iters 16 --split 80,20,0 {MORE.get(optimizer, '')} "
    )


@pytest.mark.parametrize(
    "optimizer",
    [one for one in OPTIMIZERS if MUON or one != "muon"] + ["torch.optim:NAdam"],
)
def test_learns_and_goes_on(
    train: Callable[..., Any], assert_same: Callable[..., None], optimizer: str
) -> None:
    """The loss falls; a run stopped at step 7 continues with the unbroken run's bits.

    The unbroken one validates on its way, and the other one saves: neither leaves a trace.
    """
    settings = flags(optimizer) + "--hidden-size 64 "
    whole = train("whole", settings + "--eval-iters 1 --eval-interval 4")
    assert whole.status == 0, whole.err
    losses = [row["loss"] for row in whole.rows]
    assert sum(losses[-4:]) / 4 < losses[0] - 0.3
    first = train("first", settings + "--exit-interval 7")
    assert first.status == 0, first.err
    second = train("second", settings + f"--load {first.directory}")
    assert second.status == 0, second.err
    joined = [row["loss"] for row in first.rows + second.rows]
    assert joined == losses
    assert_same(second.saved(), whole.saved())


def test_other_optimizers_state_is_refused(train: Callable[..., Any]) -> None:
    """Both are named, and the way out works."""
    first = train("first", flags("adam8bit") + "--exit-interval 2")
    again = f"{flags('adopt')} --load {first.directory} "
    refused = train("refused", again)
    assert refused.status == 2
    assert "was written with `--optimizer adam8bit`, this run uses `adopt`" in refused.err
    assert "`--no-load-optim`" in refused.err
    anew = train("anew", again + "--no-load-optim")
    assert anew.status == 0, anew.err
    assert len(anew.rows) == 14


def test_averaged_weights_are_the_ones_that_are_used(train: Callable[..., Any]) -> None:
    """Schedule-free saves and validates the average, not the weights in training."""
    run = train("run", flags("schedulefree") + "--eval-iters 1 --eval-interval 16")
    tuned = train(
        "tuned",
        f"--load {run.directory} --finetune --lr 1e-12 --train-iters 1 --split 80,20,0 "
        "--eval-iters 1",
    )
    assert tuned.status == 0, tuned.err
    assert tuned.rows[-1]["valid_loss"] == pytest.approx(run.rows[-1]["valid_loss"], abs=1e-5)


def test_option_of_another_optimizer(train: Callable[..., Any]) -> None:
    """It is a wrong setting, not a silent one."""
    run = train("run", "--optimizer sgd --muon-momentum 0.8")
    assert run.status == 2
    assert "`--muon-momentum 0.8` needs `--optimizer muon`" in run.err


@pytest.mark.distributed
@pytest.mark.parametrize(
    "optimizer, layout",
    [
        ("lamb", "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 8"),
        pytest.param("lamb", "--zero-stage 1", marks=pytest.mark.full),
        pytest.param("schedulefree", "--zero-stage 1", marks=pytest.mark.full),
        ("schedulefree", "--zero-stage 3"),
        ("sgd", "--zero-stage 2"),
        pytest.param("torch.optim:NAdam", "", marks=pytest.mark.full),
        ("torch.optim:NAdam", "--zero-stage 1 --optimizer-elementwise"),
        pytest.param("adopt", "--zero-stage 1", marks=pytest.mark.full),
    ],
)
def test_parts_of_parameters(
    train_once: Any, start: Any, finish: Any, optimizer: str, layout: str
) -> None:
    """Two processes that hold parts of the parameters train as one that holds them whole.

    With validations, after which schedule-free continues with other weights than it validated.
    """
    common = (
        f"--optimizer {optimizer} --lr {RATES[optimizer]} --lr-decay-style constant "
        "--train-iters 6 --split 80,20,0 --eval-iters 1 --eval-interval 2 --global-batch-size 8 "
    )
    alone = train_once(common + "--micro-batch-size 8 --make-vocab-size-divisible-by 16")
    divisor = "" if "divisible" in layout else "--make-vocab-size-divisible-by 16"
    flags = f"--nproc-per-node 2 --micro-batch-size 4 {layout} {divisor} {common}"
    together = finish(start("together", flags), "together")
    assert together.status == 0, together.err
    for name in ("loss", "grad_norm", "valid_loss"):
        wanted = [row[name] for row in alone.rows if row.get(name) is not None]
        found = [row[name] for row in together.rows if row.get(name) is not None]
        assert found == pytest.approx(wanted, rel=2e-5), name


def test_class_of_torch_is_not_sharded_unless_the_user_says_so(train: Any) -> None:
    """The message names the switch that says so."""
    run = train("run", "--optimizer torch.optim:NAdam --zero-stage 1 --nproc-per-node 2")
    assert run.status == 2
    assert "`--optimizer torch.optim:NAdam` cannot be combined with `--zero-stage 1`" in run.err
    assert "`--optimizer-elementwise`" in run.err


def test_adamw_of_torch_has_the_losses_of_ours(train: Any) -> None:
    """Losses agree within float32 rounding."""
    ours = train("ours", flags("adam"))
    torchs = train("torchs", flags("adam").replace("adam ", "torch.optim:AdamW "))
    assert torchs.status == 0, torchs.err
    wanted = [row["loss"] for row in ours.rows]
    assert [row["loss"] for row in torchs.rows] == pytest.approx(wanted, rel=1e-5)


def test_unknown_class_ends_the_run(train: Any) -> None:
    """The message is the one of a wrong setting."""
    run = train("run", "--optimizer torch.optim:NAdm")
    assert run.status == 2
    assert "did you mean `NAdam`" in run.err


def test_whole_matrices_are_not_sharded(train: Any) -> None:
    """The layout that an optimizer does not bear is refused before anything starts."""
    run = train("run", "--optimizer muon --zero-stage 1 --nproc-per-node 2")
    assert run.status == 2
    assert "`--optimizer muon` cannot be combined with `--zero-stage 1`" in run.err
