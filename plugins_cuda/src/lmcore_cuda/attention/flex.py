"""Attention with a mask by torch's FlexAttention, which skips blocks that are hidden entirely.

A batch of several documents each hides most of the keys: with a dense mask all scores are computed,
here only products of blocks with a visible key are computed.  The visible blocks of 128 by 128 are
found once per mask, which all layers share, and kept as long as the mask lives.

Shapes: B batch, N heads, S queries, T keys, D head channels; b and n: B and N, or 1 if the mask
is the same for all; Q, K blocks of queries and of keys; M, L positions within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from lmcore_cuda.attention import sdpa

__all__ = ["BLOCK", "FlexAttention", "attention", "block_mask"]

BLOCK = 128
"""Queries and keys of a block: FlexAttention's own."""


def block_mask(mask: Tensor, queries: int, keys: int, *, causal: bool) -> BlockMask:
    """Return masks of blocks: hidden, partly visible, entirely visible.

    Args:
        mask: Boolean, broadcastable to [B, N, S, T]; True hides.
        queries: S.
        keys: T.
        causal: True to hide later keys as well; the last query sees all.
    """
    visible_bnST = ~mask[(None,) * (4 - mask.dim())]
    visible_bnST = visible_bnST.expand(*visible_bnST.shape[:2], queries, keys)
    if causal:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=mask.device)
        visible_bnST = visible_bnST & ones.tril(diagonal=keys - queries)
    padded = functional.pad(visible_bnST, (0, -keys % BLOCK, 0, -queries % BLOCK))
    blocks_bnQMKL = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    count_bnQK = blocks_bnQMKL.sum(dim=(3, 5), dtype=torch.int32)
    whole_bnQK = count_bnQK == BLOCK * BLOCK
    part_bnQK = (count_bnQK > 0) & ~whole_bnQK

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = batch if visible_bnST.shape[0] > 1 else batch * 0
        head_index = head if visible_bnST.shape[1] > 1 else head * 0
        return visible_bnST[own, head_index, query, key]

    return BlockMask.from_kv_blocks(
        *_listed(part_bnQK),
        *_listed(whole_bnQK),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _listed(chosen_bnQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen key blocks of each query block, and their indices first."""
    count_bnQ = chosen_bnQK.sum(dim=-1, dtype=torch.int32)
    order_bnQK = chosen_bnQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return count_bnQ, order_bnQK.to(torch.int32).contiguous()


class FlexAttention:
    """The kernel, with the block masks of the masks that are alive."""

    def __init__(self, compiled: Callable[..., Any] | None = None) -> None:
        """Keep *compiled*, the compiled FlexAttention; None: compile it at the first call."""
        self._compiled = compiled
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(
        self,
        q_BNSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *,
        causal: bool,
        dropout: float = 0.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax attention; use torch's other kernels without a mask or with dropout."""
        if mask is None or dropout:
            return sdpa.attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)
        shared = q_BNSD.shape[1] != k_BKTD.shape[1]
        if torch.compiler.is_compiling():  # a part of the block that is being compiled
            blocks = block_mask(mask, q_BNSD.shape[2], k_BKTD.shape[2], causal=causal)
            found: Any = flex_attention
            inlined: Tensor = found(q_BNSD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=shared)
            return inlined
        if self._compiled is None:
            # Without a compiler FlexAttention computes every score; `fullgraph` has it say so.
            self._compiled = torch.compile(flex_attention, fullgraph=True)
        blocks = self.blocks(mask, q_BNSD.shape[2], k_BKTD.shape[2], causal=causal)
        out: Tensor = self._compiled(q_BNSD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=shared)
        return out

    def blocks(self, mask: Tensor, queries: int, keys: int, *, causal: bool) -> BlockMask:
        """Return the block mask of a mask, or of a part of one, cached while the mask lives."""
        owner = mask if mask._base is None else mask._base  # noqa: SLF001  # no public name
        if owner.is_inference():  # has no version by which a change would be seen
            return block_mask(mask, queries, keys, causal=causal)
        place = (mask.storage_offset(), tuple(mask.shape), mask.stride())
        case = (*place, mask._version, queries, keys, causal)  # noqa: SLF001  # no public name
        known: dict[Any, BlockMask] = self._known.setdefault(owner, {})
        if case not in known:
            known[case] = block_mask(mask, queries, keys, causal=causal)
        return known[case]


attention = FlexAttention()
