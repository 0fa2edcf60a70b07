"""Blocks of T5: self-attention with or without a bias for distances, cross-attention, feed-forward.

Shapes: B batch, S queries, T keys, H hidden, N heads, K heads of keys and values, D head channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.families.layers import cross_attention as layers
from lmcore.families.layers.attention_bias import biased_attention
from lmcore.families.layers.projection import Embedding
from lmcore.families.layers.transformer import Attention, Block, bound_attention, norm_of

if TYPE_CHECKING:
    from lmcore.families.layers.cache import LayerCache
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = [
    "CrossAttention",
    "DecoderBlock",
    "EncoderBlock",
    "RelativeBias",
    "SelfAttention",
    "distance_buckets",
]


def distance_buckets(
    distance_ST: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Return the group of each distance, int64 of the same shape.

    Half of the groups have one distance each, the others ranges that grow exponentially, up to
    *max_distance*.

    Args:
        distance_ST: Position of the key minus position of the query, int64.
        num_buckets: Number of groups.
        max_distance: Distance from which all are one group.
        bidirectional: True: half of the groups are for keys after the query; False: such keys are
            in the group of distance 0.

    Source:
        Raffel et al. 2020 (https://arxiv.org/abs/1910.10683), section 2.1, and its code.
    """
    after_ST = torch.zeros_like(distance_ST)
    if bidirectional:
        num_buckets //= 2
        after_ST = (distance_ST > 0).long() * num_buckets
        far_ST = distance_ST.abs()
    else:
        far_ST = (-distance_ST).clamp(min=0)
    exact = max(1, num_buckets // 2)
    octaves = math.log(max(max_distance, exact + 1) / exact)
    growth_ST = torch.log(far_ST.clamp(min=1).float() / exact) / octaves * (num_buckets - exact)
    # Below `exact` the growth is negative and not used.
    grown_ST = (exact + growth_ST.long()).clamp(max=num_buckets - 1)
    return after_ST + torch.where(far_ST < exact, far_ST, grown_ST)


class RelativeBias(Embedding):
    """Bias of attention scores for each group of distances and each head of one stack."""

    of_tokens = False

    def __init__(self, shape: ModelShape, *, bidirectional: bool) -> None:
        """Build the table; see `distance_buckets`."""
        own = shape.own
        self.max_distance: int = own["relative_attention_max_distance"]
        self.bidirectional = bidirectional
        super().__init__(own["relative_attention_num_buckets"], shape.num_attention_heads)

    def addend(self, positions_BS: Tensor, padding_BS: Tensor | None = None) -> Tensor:
        """Return what attention adds to its scores, [B or 1, N, S, S]; -inf where a key is hidden.

        Args:
            positions_BS: Position of each token, [S] or [B, S].
            padding_BS: True at padding, which no token attends to; None: there is none.
        """
        distance = positions_BS.unsqueeze(-2) - positions_BS.unsqueeze(-1)
        bias = bias_BNSS = self._of(distance)
        if not self.bidirectional:
            later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
            bias_BNSS = bias_BNSS.masked_fill(later, -torch.inf)
        if padding_BS is not None:
            bias_BNSS = bias_BNSS.masked_fill(padding_BS[:, None, None, :], -torch.inf)
        return bias_BNSS

    def next_addend(self, positions_BS: Tensor, num_keys: int) -> Tensor:
        """Return the same for new tokens over a cache, [B or 1, N, S, T]; later keys are hidden.

        Args:
            positions_BS: Position of each new token, [S] or [B, S].
            num_keys: T, number of tokens of the longest sequence.
        """
        keys = torch.arange(num_keys, device=positions_BS.device)
        distance = keys - positions_BS.unsqueeze(-1)
        later = (distance > 0).unsqueeze(-3)
        return self._of(distance).masked_fill(later, -torch.inf)

    def _of(self, distance: Tensor) -> Tensor:
        buckets = distance_buckets(
            distance,
            num_buckets=self.num_embeddings,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        bias: Tensor = self(buckets).movedim(-1, -3)
        return bias if bias.ndim == 4 else bias.unsqueeze(0)


def _unscaled(op: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    """Return an attention op without its division by the root of a head's channels."""

    def call(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, **options: object) -> Tensor:
        return op(q_BNSD * factor, k_BKTD, v_BKTD, **options)

    return call


class SelfAttention(Attention):
    """Attention within a stack; with relative positions its mask is `RelativeBias.addend`."""

    def attention_op(
        self, shape: ModelShape, ops: OpBinding, *, masked: bool, causal: bool
    ) -> Callable[..., Tensor]:
        """Return the op of queries, keys and values."""
        scaled = shape.own["t5_scaled_attention"]
        self.standard = scaled and not shape.relative_positions
        if shape.relative_positions:
            bias = {"score_bias": True, "score_bias_gradient": True}
            bound = bound_attention(shape, ops, masked=True, causal=False, **bias)
            op: Callable[..., Tensor] = functools.partial(biased_attention, op=bound)
        else:
            op = super().attention_op(shape, ops, masked=masked, causal=causal)
        return op if scaled else _unscaled(op, shape.head_dim**0.5)


class CrossAttention(layers.CrossAttention):
    """Attention of a decoder's tokens to the states of the encoder."""

    def attention_op(
        self, shape: ModelShape, ops: OpBinding, *, masked: bool, causal: bool
    ) -> Callable[..., Tensor]:
        """Return the op of queries, keys and values."""
        op = super().attention_op(shape, ops, masked=masked, causal=causal)
        return op if shape.own["t5_scaled_attention"] else _unscaled(op, shape.head_dim**0.5)


class EncoderBlock(Block):
    """Block of the encoder: self-attention and feed-forward layer."""

    attention_class = SelfAttention


class DecoderBlock(EncoderBlock):
    """Block of the decoder: self-attention, attention to the encoder, feed-forward layer."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run_attention: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
        activation: str = "",
    ) -> None:
        """Build the block; see `Block`."""
        super().__init__(
            shape, ops, run_attention, masked=masked, causal=True, activation=activation
        )
        self.cross_attention_norm = norm_of(shape, ops)
        self.cross_attention = CrossAttention(shape, ops, run_attention)

    def forward(  # type: ignore[override]  # with the states of the encoder
        self,
        x_BSH: Tensor,
        mask_B1SS: Tensor | None = None,
        memory_BTH: Tensor | None = None,
        memory_mask_B1ST: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the three branches.

        Args:
            x_BSH: Residual stream.
            mask_B1SS: Addend of self-attention with relative positions; None: there is none.
            memory_BTH: States of the encoder.
            memory_mask_B1ST: See `CrossAttention.forward`.
        """
        x_BSH = self.attend(x_BSH, None, mask_B1SS)
        normal_BSH = self.cross_attention_norm(x_BSH)
        branch_BSH = self.cross_attention(normal_BSH, memory_BTH, memory_mask_B1ST)
        return self.feed(self.added(branch_BSH, self.cross_attention.output_bias, x_BSH))

    def decode(
        self,
        x_BSH: Tensor,
        cache: LayerCache,
        mask: Tensor | None,
        keys: tuple[Tensor, Tensor],
        memory_mask_B1ST: Tensor | None,
    ) -> Tensor:
        """Return the residual stream of tokens after those in a cache, which is extended.

        Args:
            x_BSH: Residual stream.
            cache: Keys and values of the decoder's tokens before.
            mask: Mask or addend of self-attention; None: there is none.
            keys: Keys and values of the encoder's states.
            memory_mask_B1ST: See `CrossAttention.forward`.
        """
        x_BSH = self.attend(x_BSH, cache, mask)
        branch_BSH = self.cross_attention.read(
            self.cross_attention_norm(x_BSH), keys, memory_mask_B1ST
        )
        return self.feed(self.added(branch_BSH, self.cross_attention.output_bias, x_BSH))
