"""`Biencoder`: vectors of questions and of blocks, and the loss that joins them.

Each question is to find its block among the blocks of its micro-batch on all data-parallel ranks.
Shapes: B micro-batch, N blocks of all ranks, S sequence, P channels of a vector, H hidden.

Source: Lee et al. 2019 (https://arxiv.org/abs/1906.00300); names and sizes are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.bert.model import Bert
from lmcore.families.ict.family import towers
from lmcore.families.layers.projection import Linear
from lmcore.families.protocol import Model, TensorParallelPlan
from lmcore.families.recompute import KEEP_ALL, Recompute

if TYPE_CHECKING:
    from lmcore.families.layers.transformer import Attention, Block
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["Biencoder", "Tower"]


class _FirstToken(nn.Module):
    """Choice of the first token's state, which parallelism may wrap as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.op: Callable[..., Tensor] = lambda x_BSH: x_BSH[:, 0]

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.op(x_BSH)


class Tower(Bert):
    """Encoder of texts to vectors: BERT's body, and a projection of the first token's state."""

    def build_heads(self, ops: OpBinding) -> None:
        """Build the choice of the token and, if there is one, the projection."""
        self.first = _FirstToken()
        if size := self.shape.own["biencoder_projection_dim"]:
            self.projection = Linear(self.shape.hidden_size, size, ops)

    @property
    def head_modules(self) -> dict[str, nn.Module]:
        """The projection by its attribute name, if there is one."""
        return self.present("projection")

    def vectors(self, tokens_BS: Tensor, padding_BS: Tensor | None = None) -> Tensor:
        """Return the vectors of texts, [B, P], in float32 or wider.

        Args:
            tokens_BS: Token ids of the texts, [CLS] first.
            padding_BS: True at padding; None: there is none.
        """
        return self.vectors_of(self.hidden(tokens_BS, padding_BS=padding_BS))

    def vectors_of(self, hidden_BSH: Tensor) -> Tensor:
        """Return the vectors of texts, [B, P], in float32 at least.

        Args:
            hidden_BSH: States of their tokens.
        """
        x_BP: Tensor = self.first(hidden_BSH)
        if "projection" in self._modules:
            x_BP = self.projection(x_BP)
        return x_BP.to(torch.promote_types(x_BP.dtype, torch.float32))

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of the encoder, BERT's; every rank computes the vectors."""
        last = self.projection if "projection" in self._modules else self.first
        return replace(super().tensor_parallel_plan(), whole_heads=[last])


class Biencoder(Model):
    """Two encoders, or one that both names mean."""

    causal = False

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
        for name in towers(shape):
            self.add_module(name, Tower(shape, ops, recompute, part=part))
        self.scale = shape.hidden_size**-0.5 if shape.own["retriever_score_scaling"] else 1.0

    @property
    def towers(self) -> list[Tower]:
        """Encoders, without repetition."""
        return [cast("Tower", module) for module in self.children()]

    @property
    def layers(self) -> list[Block]:
        """Blocks of both encoders, in order."""
        return [block for tower in self.towers for block in tower.layers]

    @property
    def attentions(self) -> list[Attention]:
        """Attention module of each block."""
        return [one for tower in self.towers for one in tower.attentions]

    def query_vectors(self, tokens_BS: Tensor, padding_BS: Tensor | None = None) -> Tensor:
        """Return the vectors of questions, [B, P]; see `Tower.vectors`."""
        return self.towers[0].vectors(tokens_BS, padding_BS)

    def block_vectors(self, tokens_BS: Tensor, padding_BS: Tensor | None = None) -> Tensor:
        """Return the vectors of blocks, [B, P]; see `Tower.vectors`."""
        return self.towers[-1].vectors(tokens_BS, padding_BS)

    def outputs(self, tokens_BS: Tensor, positions_BS: Tensor) -> list[Tensor]:
        """Return the vector of some tokens by each encoder; see `Model`."""
        return [one.vectors_of(one.every_embedding(tokens_BS, positions_BS)) for one in self.towers]

    def loss(self, **batch: Tensor) -> Tensor:
        """Return the loss, and in evaluation the weights of the questions that find their block.

        These are one sum for each number of places of `Loss.top`: the block is among so many with
        the highest scores.  A block with the same score counts as a higher one.

        Args:
            batch: Tensors by the names of the family's batch:

                - query_BS: token ids of the questions;
                - query_padding_BS: True at padding;
                - block_BS: token ids of their blocks;
                - block_padding_BS: True at padding;
                - query_weight_B: weight of each question.
        """
        query_BP = self.query_vectors(batch["query_BS"], batch["query_padding_BS"])
        block_BP = self.block_vectors(batch["block_BS"], batch["block_padding_BS"])
        block_NP, first = self.gather_samples(block_BP)
        with torch.autocast(query_BP.device.type, enabled=False):  # it would round the scores
            scores_BN = query_BP @ block_NP.T * self.scale
        weight_B = batch["query_weight_B"]
        own_B = torch.arange(first, first + len(query_BP), device=query_BP.device)
        each_B = functional.cross_entropy(scores_BN, own_B, reduction="none")
        loss = (each_B * weight_B).sum()
        if self.training:
            return loss
        place_B = (scores_BN >= scores_BN.gather(1, own_B[:, None])).sum(dim=1)
        top = self.family.losses[0].top
        return torch.stack([loss, *(((place_B <= best) * weight_B).sum() for best in top)])

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after some blocks of an encoder, or the loss; see `Model`."""
        if hidden_BSH is None or last:
            return self.loss(**batch)
        return self.towers[0].run_blocks(hidden_BSH, None, layers)

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model: of each encoder."""
        return TensorParallelPlan([], [], parts=[one.tensor_parallel_plan() for one in self.towers])
