"""Retro: GPT whose layers read the encoded neighbours of each chunk of the text.

Shapes: B batch, S sequence, L chunks of a sequence, M tokens of a chunk, K neighbours of a chunk,
R tokens of a neighbour, C = B * L chunks, T = K * R, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn

from lmcore.families.gpt.model import GPT
from lmcore.families.layers.transformer import Attention, Block
from lmcore.families.protocol import SourceLM, TensorParallelPlan
from lmcore.families.recompute import KEEP_ALL, Recompute
from lmcore.families.retro.block import ATTENTION, NORM, Memory, NeighborBlock, ReadingBlock
from lmcore.families.retro.cache import RetroCache
from lmcore.families.retro.family import reading_layers

if TYPE_CHECKING:
    import torch

    from lmcore.families.layers.cross_attention import CrossAttention
    from lmcore.families.layers.projection import Linear
    from lmcore.families.layers.rotary import Rotation
    from lmcore.families.op_binding import OpBinding
    from lmcore.families.retro.cache import RetroView
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["Retro"]


class Retro(GPT, SourceLM):
    """Causal language model with neighbours; without them it is GPT."""

    answers: ClassVar[bool] = False

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        recompute: Recompute = KEEP_ALL,
        *,
        masked: bool = False,
        part: ModelPart | None = None,
    ) -> None:
        """Build the model; see `Model`."""
        super().__init__(shape, ops, recompute, masked=masked, part=part)
        if not (self.part.embedding and self.part.head):
            raise self.unsupported("--pipeline-model-parallel-size")
        self.chunk: int = shape.own["retro_chunk_length"]
        self.encoder = nn.ModuleDict(
            {
                str(number): NeighborBlock(shape, ops, recompute.attention, first=number == 0)
                for number in range(shape.own["retro_encoder_layers"])
            }
        )

    def build_blocks(self, ops: OpBinding, *, masked: bool, **options: Any) -> nn.ModuleDict:
        """Return the blocks of the decoder; some read neighbours."""
        blocks = super().build_blocks(ops, masked=masked, **options)
        for number in reading_layers(self.shape):
            blocks[str(number)] = ReadingBlock(
                self.shape, ops, self.recompute.attention, masked=masked
            )
        return blocks

    @property
    def layers(self) -> list[Block]:
        """Blocks of the encoder, then of the decoder."""
        return [*self.encoder_blocks, *self.decoder_blocks]

    @property
    def encoder_blocks(self) -> list[NeighborBlock]:
        """Blocks of the encoder, in order."""
        return [cast("NeighborBlock", block) for block in self.encoder.values()]

    @property
    def decoder_blocks(self) -> list[Block]:
        """Blocks of the decoder, in order."""
        return [cast("Block", block) for block in self.blocks.values()]

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """Cross-attention of the encoder's first block and of the blocks that read neighbours."""
        reading = [block for block in self.decoder_blocks if isinstance(block, ReadingBlock)]
        first = self.encoder_blocks[0]
        return [first.cross_attention, *(block.cross_attention for block in reading)]

    @property
    def attentions(self) -> list[Attention]:
        """Attention modules of both stacks, cross-attention among them."""
        return [*(block.attention for block in self.layers), *self.cross_attentions]

    def forward(  # type: ignore[override]  # with neighbours
        self,
        tokens_BS: Tensor,
        cache: RetroView | None = None,
        *,
        positions_BS: Tensor | None = None,
        neighbors_BLKR: Tensor | None = None,
        neighbor_padding_BLKR: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, [B, S, H].

        Args:
            tokens_BS: Token ids; with neighbours, whole chunks.
            cache: Keys and values of the tokens before these, and their neighbours; extended in
                place.
            positions_BS: Position of each token; None: its index in the sequence, or the cache's.
            neighbors_BLKR: Token ids of the neighbours of each chunk; None: nothing is read, and
                only without *cache*.
            neighbor_padding_BLKR: True at padding of the neighbours, which is not read; None: there
                is none.
        """
        if cache is not None:
            assert cache.mask_B11T is None or self.masked, "attention was bound without a mask"
            positions_BS = cache.positions
        x_BSH = self.embed(tokens_BS, positions_BS)
        rotation = self.rotation(tokens_BS, positions_BS, x_BSH.dtype)
        if cache is not None:
            for block, layer_cache in zip(self.decoder_blocks, cache.layers, strict=True):
                x_BSH = block.attend(x_BSH, layer_cache, cache.mask_B11T, rotation)
                if isinstance(block, ReadingBlock):
                    x_BSH = x_BSH + cache.read(block, block.cross_attention_norm(x_BSH))
                x_BSH = block.feed(x_BSH)
        elif neighbors_BLKR is None:
            x_BSH = self.run_layers(x_BSH, self.decoder_blocks, rotation=rotation)
        else:
            x_BSH = self._reading(x_BSH, neighbors_BLKR, neighbor_padding_BLKR, rotation)
        return self.final_norm(x_BSH)  # type: ignore[no-any-return]

    def _reading(
        self,
        x_BSH: Tensor,
        neighbors_BLKR: Tensor,
        padding_BLKR: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """Return the hidden states after the decoder's blocks, which read neighbours."""
        blocks = self.decoder_blocks
        first = reading_layers(self.shape)[0]
        early: list[Callable[..., Tensor]] = list(blocks[:first])
        early.append(functools.partial(blocks[first], part=ATTENTION))
        x_BSH = self.run_layers(x_BSH, early, rotation=rotation)
        normal_BSH: Tensor = blocks[first](x_BSH, part=NORM)
        chunk_CMH = normal_BSH.unflatten(1, (-1, self.chunk)).flatten(0, 1)
        padding_CKR = None if padding_BLKR is None else padding_BLKR.flatten(0, 1)
        memory = self.encode(neighbors_BLKR.flatten(0, 1), padding_CKR, chunk_CMH)
        late: list[Callable[..., Tensor]] = [
            functools.partial(block, memory=memory, part="" if number else "rest")
            if isinstance(block, ReadingBlock)
            else block
            for number, block in enumerate(blocks[first:])
        ]
        return self.run_layers(x_BSH, late, rotation=rotation)

    def encode(self, tokens_CKR: Tensor, padding_CKR: Tensor | None, chunk_CMH: Tensor) -> Memory:
        """Return the encoded neighbours of chunks.

        Args:
            tokens_CKR: Token ids of the neighbours.
            padding_CKR: True at padding; None: there is none.
            chunk_CMH: States of the chunks, which the first block of the encoder attends to.
        """
        tokens_NR = tokens_CKR.flatten(0, 1)
        x_NRH = self.embed(tokens_NR)
        given: dict[str, Any] = {"rotation": self.rotation(tokens_NR, None, x_NRH.dtype)}
        if padding_CKR is not None:
            hidden_N11R = padding_CKR.flatten(0, 1)[:, None, None]
            given["mask_B1SS"] = hidden_N11R.expand(-1, 1, tokens_NR.shape[1], -1)
        first, *rest = self.encoder_blocks
        blocks: list[Callable[..., Tensor]] = [functools.partial(first, chunk_CMH=chunk_CMH)]
        blocks += rest
        x_NRH = self.run_layers(x_NRH, blocks, **given)
        padding_CT = None if padding_CKR is None else padding_CKR.flatten(1)
        return Memory(x_NRH.view(len(tokens_CKR), -1, x_NRH.shape[-1]), padding_CT)

    def new_cache(self, dtype: torch.dtype) -> RetroCache:
        """Return an empty cache on the model's device."""
        reading = [block for block in self.decoder_blocks if isinstance(block, ReadingBlock)]
        return RetroCache(self.shape, self.encode, reading, device=self.device, dtype=dtype)

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model: both stacks are split as in GPT."""
        plan, crossed = super().tensor_parallel_plan(), self.cross_attentions
        inputs: list[Linear] = [one for each in crossed for one in (each.query, each.key_value)]
        return replace(
            plan,
            column=[*plan.column, *inputs],
            row=[*plan.row, *(each.output for each in crossed)],
        )

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after some blocks of one stack, to see their products.

        The hidden states are the neighbours' too, repeated to the length of a chunk.
        """
        assert hidden_BSH is not None, "pipelines are refused"
        assert not last, "pipelines are refused"
        x_1MH = hidden_BSH.repeat(1, -(-self.chunk // hidden_BSH.shape[1]), 1)[:1, : self.chunk]
        for layer in layers:
            given: dict[str, Any] = {}
            if isinstance(layer, ReadingBlock):
                given = {"memory": Memory(x_1MH)}
            elif isinstance(layer, NeighborBlock) and layer.first:
                given = {"chunk_CMH": x_1MH}
            tokens_1M = batch["tokens_BS"].new_zeros(x_1MH.shape[:2])
            rotation = self.rotation(tokens_1M, None, x_1MH.dtype)
            x_1MH = self.run_layers(x_1MH, [layer], rotation=rotation, **given)
        return x_1MH
