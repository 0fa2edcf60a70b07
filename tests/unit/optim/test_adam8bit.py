"""AdamW with moments in 8 bits against the same in numpy, and against plain AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmcore.optim.quantized_moment import dynamic_grid


def through_8_bits(moment: Any, *, signed: bool) -> Any:
    if moment.size < 4096:
        return moment
    grid = dynamic_grid(signed=signed).numpy().astype(np.float64)
    padded = np.zeros(-(-moment.size // 256) * 256)
    padded[: moment.size] = moment.ravel()
    blocks = padded.reshape(-1, 256)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-12)
    middles = (grid[1:] + grid[:-1]) / 2
    values = grid[np.searchsorted(middles, blocks / scales, side="right")] * scales
    return values.ravel()[: moment.size].reshape(moment.shape)


def adam8bit(
    name: str, weight: Any, gradient: Any, lr: float, step: int, kept: dict[str, Any]
) -> Any:
    first = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
    second = 0.95 * kept.get("v", 0.0) + 0.05 * gradient**2
    kept["m"] = through_8_bits(first, signed=True)
    kept["v"] = through_8_bits(second, signed=False)
    if weight.ndim >= 2:
        weight = weight * (1 - lr * 0.1)
    return weight - lr * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)


def test_matches_the_formula(bench: Any) -> None:
    """The step uses exact moments; what is kept of them goes through 8 bits.

    Where float32 and float64 round to different codes a weight may differ by a part of a step.
    """
    bench.check("adam8bit", adam8bit, steps=6, tolerance=1e-4)


def test_first_step_is_adams(bench: Any) -> None:
    """Nothing has been rounded before the first step."""
    ours, plain = bench.weights(), bench.weights()
    bench.advance(ours, bench.make("adam8bit", ours), range(1))
    bench.advance(plain, bench.make("adam", plain), range(1))
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_state_is_small(bench: Any) -> None:
    """A large parameter has a byte a number and a scale a block; small ones keep float32."""
    state = bench.make("adam8bit", bench.weights()).state_tensors()
    large = state["exp_avg.token_embedding.weight"]
    assert (large.dtype, tuple(large.shape)) == (torch.uint8, (17, 256))  # 67 * 64 / 256 = 16.75
    assert state["exp_avg_sq_scale.token_embedding.weight"].shape == (17,)
    assert state["exp_avg.blocks.0.down.weight"].dtype == torch.float32
    assert "exp_avg_scale.blocks.0.down.weight" not in state
