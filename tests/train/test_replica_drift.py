"""Replicas of parameters that drift apart: found, named, and the run ends without saving them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.distributed

TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2 --global-batch-size 8"
TIED = "token_embedding.weight"
NORM = "final_norm.weight"
STEPS = "--train-iters 9 --lr-decay-iters 9"


def drifting(rank: int, step: int, name: str) -> str:
    """Return code by which one element of a parameter of *rank* is one ulp larger after a step."""
    return f"""
import os, sys
def patch():
    if "torch" not in sys.modules:  # not loaded in this process: it is no rank
        return
    import importlib, torch
    owner = importlib.import_module("lmcore.train.step_queue").StepQueue
    submit = owner.submit
    def drift(queue, number):
        submit(queue, number)
        state = queue._step.state
        if os.environ.get("RANK") == "{rank}" and state.iteration == {step}:
            weight = dict(state.parallel.named_parameters())[{name!r}].detach().view(-1)
            weight[3] = torch.nextafter(weight[3], weight.new_tensor(9.0))
    owner.submit = drift
os.register_at_fork(after_in_child=patch)
"""


@pytest.mark.parametrize(
    "flags, name, size, rank",
    [
        ("", NORM, 2, 1),
        pytest.param("", TIED, 4, 2, marks=pytest.mark.full),
        (f"{TP} --sequence-parallel", NORM, 2, 0),
        (PP, TIED, 2, 1),
        pytest.param("--context-parallel-size 2", NORM, 2, 1, marks=pytest.mark.full),
        pytest.param(
            "--zero-stage 3 --data-parallel-replicas 2", TIED, 4, 3, marks=pytest.mark.full
        ),
        pytest.param(f"--zero-stage 1 {TP}", NORM, 4, 1, marks=pytest.mark.full),
        pytest.param(f"{TP} {PP}", TIED, 4, 3, marks=pytest.mark.full),
    ],
)
def test_one_ulp_is_found(
    start: Any, finish: Any, flags: str, name: str, size: int, rank: int
) -> None:
    """Within the interval: step, ranks, parameter, difference and the last good checkpoint."""
    more = f"--nproc-per-node {size} {STEPS} --check-replicas-interval 4 --save-interval 5"
    # One step before the check: in several, other parameters would differ by an ulp too.
    run = finish(start("run", f"{more} {flags}", before=drifting(rank, 7, name)), "run")
    assert run.status == 1, run.err
    assert f"error: replicas of the parameters differ after step 8: `{name}`" in run.err
    assert "by at most " in run.err
    assert "; element [" in run.err
    assert "all replicas were equal after step 5" in run.err
    good = run.directory / "checkpoints/iter_0000005"
    assert run.err.strip().endswith("to continue from step 5: `lmcore train --continue run`")
    assert [path.name for path in good.parent.glob("iter_*")] == [good.name]
    assert run.summary["status"].startswith("failed: replicas of the parameters differ")


@pytest.mark.full
def test_no_check_without_an_interval(start: Any, finish: Any) -> None:
    """With 0 a drift stays unseen, before checkpoints too, as no checksum is computed."""
    refused = """
import lmcore.parallel.replica_comparison as module
def refuse(*_):
    raise AssertionError("a checksum")
module.bit_checksum = refuse
"""
    more = f"--nproc-per-node 2 {STEPS} --check-replicas-interval 0 --save-interval 5"
    run = finish(start("run", more, before=drifting(1, 3, NORM) + refused), "run")
    assert run.status == 0, run.err
    assert run.summary["status"] == "completed"
