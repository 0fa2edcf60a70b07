"""AdamW with moments in 8 bits against the same in numpy, and against plain AdamW."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from lmcore.optim.adam8bit import BLOCK, Grid, QuantizedMoment, dynamic_grid


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


def moment_of(shape: torch.Size, *, signed: bool) -> QuantizedMoment:
    return QuantizedMoment(shape, Grid(signed=signed, device=torch.device("cpu")))


@pytest.fixture(scope="module")
def torchao():
    """The library's own functions; its import warns of what it cannot load on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.optim.quant_utils", exc_type=ImportError)


@pytest.mark.parametrize("signed", [True, False])
def test_grid_is_the_librarys(torchao, signed: bool) -> None:
    """All 256 values equal the values of bitsandbytes and torchao."""
    wanted = torch.tensor(torchao.create_dynamic_map(signed=signed))
    torch.testing.assert_close(dynamic_grid(signed=signed), wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_librarys(torchao, signed: bool) -> None:
    """The same numbers get the same codes and scales, but for ties that rounding decides."""
    numbers = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) ** 5
    numbers = numbers if signed else numbers.abs()
    moment = moment_of(numbers.shape, signed=signed)
    moment.write(numbers)
    scaled, scales = torchao.scale_tensor(numbers, BLOCK)
    codes = torchao.quantize_8bit_with_qmap(scaled, dynamic_grid(signed=signed)).view(-1, BLOCK)
    assert torch.equal(moment.scales, scales)
    apart = (moment.codes.int() - codes.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-3


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_value_is_kept(signed: bool) -> None:
    """Every number becomes the nearest of the grid's, found in float64 by looking at all."""
    numbers = torch.randn(3, 200, generator=torch.Generator().manual_seed(2)) ** 3
    numbers = numbers if signed else numbers.abs()
    moment = moment_of(numbers.shape, signed=signed)
    moment.write(numbers)
    padded = np.zeros(768)
    padded[:600] = numbers.flatten().numpy()
    grid = dynamic_grid(signed=signed).numpy().astype(np.float64)
    wanted = []
    for block in padded.reshape(3, 256):
        scale = np.abs(block).max()
        wanted.append(grid[np.abs(block[:, None] / scale - grid).argmin(1)] * scale)
    found = moment.read()
    assert found.shape == numbers.shape
    np.testing.assert_allclose(found.flatten(), np.concatenate(wanted)[:600], rtol=1e-5)


def test_zeros_stay_zeros() -> None:
    """At the beginning and after a write of zeros a moment reads as exact zeros."""
    for signed in (True, False):
        moment = moment_of(torch.Size([5, 100]), signed=signed)
        assert torch.equal(moment.read(), torch.zeros(5, 100))
        moment.write(torch.zeros(5, 100))
        assert torch.equal(moment.read(), torch.zeros(5, 100))


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_that_of_a_search(signed: bool) -> None:
    """Around every middle between two values, and far from them, the table finds the same code."""
    grid = dynamic_grid(signed=signed)
    middles = (grid[1:] + grid[:-1]) / 2
    upwards = torch.full_like(middles, torch.inf)
    near = [middles, middles.nextafter(upwards), middles.nextafter(-upwards), grid]
    many = torch.rand(100_000, generator=torch.Generator().manual_seed(4)) ** 9
    numbers = torch.cat([*near, many, *([-many] if signed else []), torch.tensor([0.0, -0.0, 1.0])])
    wanted = torch.searchsorted(middles, numbers, right=True)
    assert torch.equal(
        Grid(signed=signed, device=torch.device("cpu")).nearest(numbers).long(), wanted
    )
