"""Blocks of Retro: of the decoder, with chunked cross-attention, and of the encoder of neighbours.

The tokens from the last of a chunk to the last but one of the next read the neighbours of the
chunk: its text is complete, and no token sees what was found by later ones.

Shapes: B batch, S sequence, L chunks of a sequence, M tokens of a chunk, K neighbours of a chunk,
R tokens of a neighbour, C chunks of all sequences, T = K * R, H hidden.

Source:
    Borgeaud et al. 2022 (https://arxiv.org/abs/2112.04426); layers are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.families.layers.cross_attention import CrossAttention
from lmcore.families.layers.transformer import Block, norm_of
from lmcore.families.retro.family import encoder_shape

if TYPE_CHECKING:
    from lmcore.families.layers.cache import LayerCache
    from lmcore.families.layers.rotary import Rotation
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["ATTENTION", "NORM", "Memory", "NeighborBlock", "Readers", "ReadingBlock"]

ATTENTION, NORM = "attention", "norm"
"""Parts of the first reading block, which run before the neighbours are encoded."""


@dataclass(frozen=True)
class Readers:
    """Division of consecutive tokens into groups that read the neighbours of one chunk each.

    Attributes:
        start: Position of the first token.
        count: Number of tokens.
        chunk: Number of tokens of a chunk.
    """

    start: int
    count: int
    chunk: int

    @property
    def silent(self) -> int:
        """Number of tokens at the begin that read nothing: no chunk is complete."""
        return min(self.count, max(0, self.chunk - 1 - self.start))

    @property
    def first(self) -> int:
        """Number of the first chunk whose neighbours are read."""
        return (self.start + self.silent + 1) // self.chunk - 1

    @property
    def groups(self) -> int:
        """Number of chunks whose neighbours are read."""
        read = self.count - self.silent
        return -(-(self._before + read) // self.chunk) if read else 0

    @property
    def _before(self) -> int:
        """Number of tokens before these that read the neighbours of the first chunk."""
        return (self.start + self.silent + 1) % self.chunk

    def split(self, x_BSH: Tensor) -> Tensor:
        """Return the tokens that read neighbours by groups, [B * groups, M, H]; others are 0."""
        reading = self.count - self.silent
        after = self.groups * self.chunk - self._before - reading
        x_BPH: Tensor = functional.pad(x_BSH[:, self.silent :], (0, 0, self._before, after))
        x_CMH: Tensor = x_BPH.unflatten(1, (self.groups, self.chunk)).flatten(0, 1)
        return x_CMH

    def join(self, x_CMH: Tensor) -> Tensor:
        """Return the inverse of `split`, [B, S, H], with 0 for tokens that read nothing."""
        x_BPH = x_CMH.unflatten(0, (-1, self.groups)).flatten(1, 2)
        reading = self.count - self.silent
        x_BSH = x_BPH[:, self._before : self._before + reading]
        return functional.pad(x_BSH, (0, 0, self.silent, 0))


@dataclass(frozen=True)
class Memory:
    """Encoded neighbours of chunks.

    Attributes:
        states_CTH: States of the encoder.
        padding_CT: True at padding, which is not read; None: there is none.
    """

    states_CTH: Tensor
    padding_CT: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """Mask of cross-attention; None: nothing is hidden."""
        return None if self.padding_CT is None else self.padding_CT[:, None, None]


class ReadingBlock(Block):
    """Block of the decoder: self-attention, chunked cross-attention, feed-forward layer."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run_attention: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
    ) -> None:
        """Build the block; see `Block`."""
        super().__init__(shape, ops, run_attention, masked=masked)
        self.chunk: int = shape.own["retro_chunk_length"]
        self.gate: float = shape.own["retro_attention_gate"]
        self.cross_attention_norm = norm_of(shape, ops)
        self.cross_attention = CrossAttention(shape, ops, run_attention)

    def forward(  # type: ignore[override]  # with neighbours, without ALiBi
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
        rotation: Rotation | None = None,
        memory: Memory | None = None,
        part: str = "",
    ) -> Tensor:
        """Return the residual stream after the three branches, or a part of the block.

        Args:
            x_BSH: Residual stream.
            cache: See `Attention.forward`, as for the next two.
            mask_B1SS: Mask of self-attention.
            rotation: Rotation of queries and keys.
            memory: Neighbours of each chunk; None: nothing is read.
            part: `ATTENTION`: return the stream after self-attention; `NORM`: return what of this
                stream cross-attention and the encoder take; `rest`: begin with this stream.
        """
        if part == NORM:
            return self.cross_attention_norm(x_BSH)  # type: ignore[no-any-return]
        if part in {"", ATTENTION}:
            x_BSH = self.attend(x_BSH, cache, mask_B1SS, rotation)
        if part == ATTENTION:
            return x_BSH
        if memory is not None:
            x_BSH = x_BSH + self.read(self.cross_attention_norm(x_BSH), memory)
        return self.feed(x_BSH)

    def read(self, normal_BSH: Tensor, memory: Memory, start: int = 0) -> Tensor:
        """Return the branch of consecutive tokens, [B, S, H]; 0 at tokens that read nothing.

        Args:
            normal_BSH: Normalized hidden states.
            memory: Neighbours of each chunk that they read, a sequence after another.
            start: Position of the first token.
        """
        readers = Readers(start, normal_BSH.shape[1], self.chunk)
        if not readers.groups:
            return torch.zeros_like(normal_BSH)
        attention, mask = self.cross_attention, memory.mask
        if mask is not None:
            mask = mask.expand(-1, 1, self.chunk, -1)
        keys = attention.keys(memory.states_CTH)
        branch_CMH = attention.read(readers.split(normal_BSH), keys, mask, attention.run)
        return readers.join(self.gated(branch_CMH, memory.padding_CT))

    def gated(self, branch_CMH: Tensor, padding_CT: Tensor | None) -> Tensor:
        """Return a branch with its last bias and dropout, and 0 where all neighbours are padding.

        Args:
            branch_CMH: Result of cross-attention.
            padding_CT: True at padding of the neighbours; None: there is none.
        """
        zero_CMH = branch_CMH.new_zeros(branch_CMH.shape)
        branch_CMH = self.added(branch_CMH, self.cross_attention.output_bias, zero_CMH)
        if padding_CT is not None:
            branch_CMH = branch_CMH * (~padding_CT).any(1)[:, None, None]
        return branch_CMH if self.gate == 1 else branch_CMH * self.gate


class NeighborBlock(Block):
    """Block of the encoder; the first one also attends to the chunk that has the neighbours."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run_attention: Callable[..., Tensor] | None = None,
        *,
        first: bool,
    ) -> None:
        """Build the block; see `Block`.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            run_attention: See `Attention`.
            first: True for the first block.
        """
        shape = encoder_shape(shape)
        super().__init__(shape, ops, run_attention, masked=True, causal=False)
        self.first = first
        if first:
            self.cross_attention_norm = norm_of(shape, ops)
            self.cross_attention = CrossAttention(shape, ops, run_attention)

    def forward(  # type: ignore[override]  # with chunks, without ALiBi
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
        rotation: Rotation | None = None,
        chunk_CMH: Tensor | None = None,
    ) -> Tensor:
        """Return the states of neighbours after the block, [C * K, R, H].

        Args:
            x_BSH: States before it.
            cache: None: neighbours are encoded at once.
            mask_B1SS: True at padding.
            rotation: Rotation of queries and keys.
            chunk_CMH: States of the chunks, for the first block.
        """
        x_BSH = self.attend(x_BSH, cache, mask_B1SS, rotation)
        if chunk_CMH is not None:
            size = x_BSH.shape
            normal_CTH = self.cross_attention_norm(x_BSH).reshape(len(chunk_CMH), -1, size[-1])
            branch_CTH = self.cross_attention(normal_CTH, chunk_CMH)
            bias = self.cross_attention.output_bias
            x_BSH = self.added(branch_CTH.view(size), bias, x_BSH)
        return self.feed(x_BSH)
