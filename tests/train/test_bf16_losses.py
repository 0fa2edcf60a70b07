"""Losses of a run in bf16 beside the same run in fp32."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

STEPS = 300
FAMILIES = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --ffn-hidden-size 128 --disable-bias-linear"
    " --position-embedding-type rope --group-query-attention --num-query-groups 1",
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_300_steps(train: Any, name: str) -> None:
    """Each step is within 2%, and the mean of the last 50 within 0.5%."""
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    flags = f"{sizes} --train-iters {STEPS} --global-batch-size 16 --micro-batch-size 16 --lr 1e-3 --eval-iters 0 {FAMILIES[name]}"
    losses = {}
    for precision in ("fp32", "bf16"):
        run = train(
            precision, f"{flags} --max-position-embeddings 64 --precision {precision}", None
        )
        assert run.status == 0, run.err
        losses[precision] = [row["loss"] for row in run.rows]
    assert len(losses["fp32"]) == STEPS
    assert losses["bf16"] != losses["fp32"]
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    means = [statistics.mean(losses[one][-50:]) for one in ("bf16", "fp32")]
    assert means[0] == pytest.approx(means[1], rel=0.005)
