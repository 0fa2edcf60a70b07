"""Sampling of the next token from logits: greedy, or with temperature, top-k and top-p.

Random numbers come from generators on the CPU, one for each row, so that a row's text depends on
its own seed, not on the device or on other rows.

Shapes: B rows, V padded vocabulary, W true vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmcore.errors import RunError
from lmcore.generation.sampling_options import SamplingOptions

__all__ = ["SamplingOptions", "new_generators", "sample"]

_SEEDS = 2**63


def new_generators(seed: int, rows: int) -> list[torch.Generator]:
    """Return a generator for each row, seeded with *seed*, *seed* + 1 and so on.

    Args:
        seed: Seed of the first row.
        rows: Number of rows.
    """
    return [torch.Generator().manual_seed((seed + row) % _SEEDS) for row in range(rows)]


def sample(
    logits_BV: Tensor,
    options: SamplingOptions,
    generators: Sequence[torch.Generator],
    *,
    vocab_size: int,
) -> Tensor:
    """Return the next token of each row, int64 [B] on the CPU.

    Args:
        logits_BV: Logits over the padded vocabulary, any dtype and device.
        options: Sampling options.
        generators: Generator of each row, on the CPU; draws one number unless sampling is greedy.
        vocab_size: Size of the vocabulary without padding, W.

    Raises:
        RunError: A row's highest logit is not finite.
    """
    logits_BW = logits_BV[:, :vocab_size]
    highest_B, likeliest_B = logits_BW.max(dim=-1)
    _require_finite(highest_B)
    if options.always_highest:
        return likeliest_B.cpu()
    # In float64 on the CPU, which not every device has: the same logits give the same token on
    # every device.
    scaled_BW = logits_BW.cpu().double() - highest_B.cpu().double().unsqueeze(-1)
    scaled_BW /= options.temperature
    if options.top_k > 0:
        scaled_BW = _keep_top_k(scaled_BW, options.top_k)
    weights_BW = scaled_BW.exp_()
    if 0.0 < options.top_p < 1.0:
        weights_BW = _keep_top_p(weights_BW, options.top_p)
    return _draw(weights_BW, generators)


def _require_finite(highest_B: Tensor) -> None:
    for row, highest in enumerate(highest_B.tolist()):
        if not math.isfinite(highest):
            raise RunError(
                f"the model's logits for the next token are not finite (row {row}: {highest})",
                why="the weights are not finite, or the precision overflowed",
                hint="try `--precision fp32`, or an earlier checkpoint",
            )


def _keep_top_k(scaled_BW: Tensor, top_k: int) -> Tensor:
    """Mask the logits below the k-th highest of their row."""
    if top_k >= scaled_BW.shape[-1]:
        return scaled_BW
    kth_B1 = scaled_BW.topk(top_k, dim=-1).values[:, -1:]
    return scaled_BW.masked_fill_(scaled_BW < kth_B1, -math.inf)


def _keep_top_p(weights_BW: Tensor, top_p: float) -> Tensor:
    """Set all weights to zero but the nucleus: the largest that reach *top_p* of their row's sum.

    The id that crosses the bound is kept, as in Megatron, and so are ids of the same weight as the
    smallest one kept: the result does not depend on their order.

    Source: Holtzman et al., 2020, section 3.1.
    """
    bound_B1 = top_p * weights_BW.sum(dim=-1, keepdim=True)
    # numpy sorts floats several times faster than torch does.
    sorted_BW = torch.from_numpy(np.sort(weights_BW.numpy(), axis=-1)).flip(-1)
    before_BW = sorted_BW.cumsum(dim=-1) - sorted_BW
    kept_B1 = (before_BW < bound_B1).sum(dim=-1, keepdim=True)
    least_B1 = sorted_BW.gather(-1, (kept_B1 - 1).clamp_(min=0))
    return weights_BW.masked_fill_(weights_BW < least_B1, 0.0)


def _draw(weights_BW: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return an id for each row, with probability proportional to its weight (inverse CDF)."""
    sums_BW = weights_BW.cumsum(dim=-1)
    total_B = sums_BW[:, -1]
    uniform_B = torch.stack(
        [torch.rand((), generator=one, dtype=torch.float64) for one in generators]
    )
    # Below the total even if the product rounds up, so that an id is found.  The first sum above
    # the point belongs to an id of nonzero weight.
    below_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    point_B1 = torch.minimum(uniform_B * total_B, below_B).unsqueeze(-1)
    return torch.searchsorted(sums_BW, point_B1, right=True).squeeze(-1)
