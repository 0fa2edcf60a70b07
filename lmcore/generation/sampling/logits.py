"""Sampling of the next token from logits: greedy, or with temperature, top-k, top-p and min-p.

Random numbers come from generators on the CPU, one for each row, so that a row's text depends on
its own seed, not on the device or on other rows.  Everything else runs on the logits' device.

Shapes: B rows, R rows that are drawn, V padded vocabulary, W true vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmcore.generation.sampling.options import SamplingOptions

__all__ = ["SamplingOptions", "apply_penalties", "new_generator", "new_generators", "sample"]

_SEEDS = 2**63
_LEAST_TEMPERATURE = 1e-30  # in float32 a much lower one is 0


def new_generator(seed: int) -> torch.Generator:
    """Return a generator on the CPU.

    Args:
        seed: Any integer.
    """
    return torch.Generator().manual_seed(seed % _SEEDS)


def new_generators(seed: int, rows: int) -> list[torch.Generator]:
    """Return a generator for each row, seeded with *seed*, *seed* + 1 and so on.

    Args:
        seed: Seed of the first row.
        rows: Number of rows.
    """
    return [new_generator(seed + row) for row in range(rows)]


def apply_penalties(
    logits_W: Tensor, options: SamplingOptions, prompt: Sequence[int], generated: Sequence[int]
) -> None:
    """Lower the logits of one row, in place, by the penalties of its options.

    Args:
        logits_W: Logits in float32 or wider.
        options: Sampling options.
        prompt: Tokens of the prompt.
        generated: Tokens generated so far.

    Source: Keskar et al., 2019, section 4.1, for the repetition penalty.
    """
    if options.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *generated}), device=logits_W.device)
        found = logits_W[seen]
        factor = options.repetition_penalty
        logits_W[seen] = torch.where(found > 0, found / factor, found * factor)
    if generated and (options.frequency_penalty or options.presence_penalty):
        counts = Counter(generated)
        ids = torch.tensor(list(counts), device=logits_W.device)
        number = torch.tensor(list(counts.values()), device=logits_W.device, dtype=logits_W.dtype)
        logits_W[ids] -= options.frequency_penalty * number + options.presence_penalty


def sample(
    logits_BW: Tensor,
    options: Sequence[SamplingOptions],
    generators: Sequence[torch.Generator],
    num_generated: Sequence[int] | None = None,
    likeliest: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the next token of each row, int64 [B] on the logits' device.

    A row whose highest logit is not finite gets any token.

    Args:
        logits_BW: Logits over the true vocabulary, any dtype and device.
        options: Sampling options of each row.
        generators: Generator of each row, on the CPU; draws one number unless sampling is greedy.
        num_generated: Number of tokens that each row has generated; None: none.
        likeliest: Highest logit of each row and its token, [B, 1] each; None: computed here.
    """
    highest_B1, likeliest_B1 = likeliest or logits_BW.max(dim=-1, keepdim=True)
    drawn = [row for row, one in enumerate(options) if not one.always_highest]
    if not drawn:
        return likeliest_B1.squeeze(-1)
    chosen = [options[row] for row in drawn]
    counts = [num_generated[row] if num_generated else 0 for row in drawn]
    everything = len(drawn) == len(options)
    index_R = torch.tensor(drawn, device=logits_BW.device)
    scaled_RW = _wide(logits_BW if everything else logits_BW[index_R])
    scaled_RW -= _wide(highest_B1 if everything else highest_B1[index_R])
    if any(one.temperature != 1.0 for one in chosen):
        divisors = [max(one.temperature, _LEAST_TEMPERATURE) for one in chosen]
        scaled_RW /= _column(divisors, scaled_RW)
    _keep_top_k(scaled_RW, [one.top_k for one in chosen])
    weights_RW = scaled_RW.exp_()
    _keep_top_p(
        weights_RW, [one.top_p_after(count) for one, count in zip(chosen, counts, strict=True)]
    )
    if any(one.min_p for one in chosen):  # the highest weight is 1
        weights_RW.masked_fill_(weights_RW < _column([one.min_p for one in chosen], weights_RW), 0)
    token_R = _draw(weights_RW, [generators[row] for row in drawn])
    return token_R if everything else likeliest_B1.squeeze(-1).index_copy(0, index_R, token_R)


def _wide(logits: Tensor) -> Tensor:
    """Return a copy in float64 on the CPU, in float32 on devices, which may lack float64."""
    dtype = torch.float64 if logits.device.type == "cpu" else torch.float32
    return logits.to(dtype, copy=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def _rows(selected: Sequence[bool], device: torch.device) -> Tensor | None:
    """Return the indices of the selected rows; None if there are none."""
    found = [row for row, yes in enumerate(selected) if yes]
    return torch.tensor(found, device=device) if found else None


def _keep_top_k(scaled_RW: Tensor, top_k: Sequence[int]) -> None:
    """Mask the logits below the k-th highest of their row; 0 keeps all."""
    size = scaled_RW.shape[-1]
    index = _rows([0 < k < size for k in top_k], scaled_RW.device)
    if index is None:
        return
    rows = scaled_RW if len(index) == len(top_k) else scaled_RW[index]
    asked = torch.tensor([k for k in top_k if 0 < k < size], device=rows.device).unsqueeze(-1)
    kth = rows.topk(int(asked.max()), dim=-1).values.gather(-1, asked - 1)
    scaled_RW[index] = rows.masked_fill(rows < kth, -math.inf)


def _keep_top_p(weights_RW: Tensor, top_p: Sequence[float]) -> None:
    """Set all weights to zero but the nucleus: the largest that reach *top_p* of their row's sum.

    The id that crosses the bound is kept, as in Megatron, and so are ids of the same weight as the
    smallest one kept: the result does not depend on their order.  0 and 1 keep all.

    Source: Holtzman et al., 2020, section 3.1.
    """
    index = _rows([0.0 < p < 1.0 for p in top_p], weights_RW.device)
    if index is None:
        return
    rows = weights_RW if len(index) == len(top_p) else weights_RW[index]
    share = _column([p for p in top_p if 0.0 < p < 1.0], rows)
    ordered = _sorted(rows)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < share * rows.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
    least = ordered.gather(-1, (kept - 1).clamp_(min=0))
    weights_RW[index] = rows.masked_fill(rows < least, 0.0)


def _sorted(rows: Tensor) -> Tensor:
    """Return each row in descending order."""
    if rows.device.type != "cpu":
        return rows.sort(dim=-1, descending=True).values
    # numpy sorts floats several times faster than torch does.
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)


def _draw(weights_RW: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return an id for each row, with probability proportional to its weight (inverse CDF)."""
    sums_RW = weights_RW.cumsum(dim=-1)
    total_R = sums_RW[:, -1]
    uniform_R = torch.stack(
        [torch.rand((), generator=one, dtype=torch.float64) for one in generators]
    ).to(total_R)
    # Below the total even if the product rounds up, so that an id is found.  The first sum above
    # the point belongs to an id of nonzero weight.
    below_R = torch.nextafter(total_R, torch.zeros_like(total_R))
    point_R1 = torch.minimum(uniform_R * total_R, below_R).unsqueeze(-1)
    found_R = torch.searchsorted(sums_RW, point_R1, right=True).squeeze(-1)
    return found_R.clamp_(max=weights_RW.shape[-1] - 1)  # a row of NaN, which the caller refuses
