"""Numbers that are only recorded: norm of the parameters, zeros in gradients, device memory."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

COMMON = (
    # 43 rows pad the vocabulary, whole or in two parts; without biases no gradient, such as that of
    # the keys' bias, is zero up to rounding.
    "--global-batch-size 8 --train-iters 3 --disable-bias-linear --log-params-norm "
    "--log-num-zeros-in-grad --log-memory-to-tensorboard --make-vocab-size-divisible-by 150"
)
PADDING = 43 * 16
"""Elements of the gradient that are zero: rows that pad the vocabulary, of 16 channels."""


def _norm_of_saved(run: Any) -> float:
    weights = [one.double() for name, one in run.saved().items() if name.startswith("model.")]
    return math.sqrt(sum(float(one.square().sum()) for one in weights))


def test_one_process(train_once: Any, train: Any) -> None:
    """The norm is the saved weights' norm, and the rows that pad the vocabulary have the zeros."""
    run = train_once(f"{COMMON} --micro-batch-size 8")
    last = run.rows[-1]
    assert last["params_norm"] == pytest.approx(_norm_of_saved(run), rel=1e-6)
    assert [row["num_zeros_in_grad"] for row in run.rows] == [PADDING] * 3
    lines = re.findall(r"grad norm: \S+ \| num zeros: (\S+) \| params norm: (\S+) \|", run.err)
    assert lines == [(f"{PADDING:.1f}", f"{row['params_norm']:.3f}") for row in run.rows]
    names = ("memory_allocated_bytes", "memory_max_allocated_bytes", "memory_reserved_bytes")
    allocated, peak, reserved = (last[name] for name in names)
    assert 0 < allocated <= peak
    assert allocated <= reserved
    without = " ".join(word for word in COMMON.split() if not word.startswith("--log"))
    plain = train("plain", f"{without} --micro-batch-size 8")
    assert plain.curve() == run.curve()
    assert not {"params_norm", "num_zeros_in_grad", *names} & plain.rows[-1].keys()


@pytest.mark.parametrize(
    "size, flags",
    [
        (2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 75"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--zero-stage 1"),
        pytest.param(2, "", marks=pytest.mark.full),
        pytest.param(2, "--zero-stage 3", marks=pytest.mark.full),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.full),
        pytest.param(
            4,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
            "--make-vocab-size-divisible-by 75",
            marks=pytest.mark.full,
        ),
        pytest.param(
            4,
            "--tensor-model-parallel-size 2 --zero-stage 2 --make-vocab-size-divisible-by 75",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.distributed
def test_several_processes(train_once: Any, start: Any, finish: Any, size: int, flags: str) -> None:
    """Each parameter and each zero counts once, however the processes divide or repeat them."""
    alone = train_once(f"{COMMON} --micro-batch-size 8")
    run = finish(
        start("run", f"--nproc-per-node {size} {COMMON} --micro-batch-size 2 {flags}"), "run"
    )
    assert run.status == 0, run.err
    norms = [row["params_norm"] for row in run.rows]
    assert norms == pytest.approx([row["params_norm"] for row in alone.rows], rel=1e-6)
    assert [row["num_zeros_in_grad"] for row in run.rows] == [PADDING] * 3


def test_another_engine(train: Any) -> None:
    """An engine that divides parameters by itself is refused with them."""
    for flag in ("--log-params-norm", "--log-num-zeros-in-grad"):
        run = train("run", f"--engine deepspeed {flag}")
        assert run.status == 2
        assert f"`{flag}`" in run.err
        assert "another engine divides parameters and gradients by itself" in run.err
