"""BERT: embeddings, bidirectional blocks, and heads for masked tokens and the sentences' order.

Post-normalized, it is the original of Devlin et al. 2018; pre-normalized, Megatron's.
Shapes: B batch, S sequence, M predicted tokens of a sample, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.block_model import BlockModel
from lmcore.families.layers.head import HeadLoss
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.layers.transformer import LayerNorm, RMSNorm, norm_of
from lmcore.families.protocol import MaskedLM, TensorParallelPlan
from lmcore.families.recompute import KEEP_ALL, Recompute

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["Bert", "MaskedHead"]


class MaskedHead(nn.Module):
    """Projection, GELU and norm before the product with the token embedding, whose bias it has."""

    def __init__(self, shape: ModelShape, ops: OpBinding) -> None:
        super().__init__()
        self.dense = Linear(shape.hidden_size, shape.hidden_size, ops)
        self.norm = norm_of(shape, ops)
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocab_size))
        # The exact GELU, whichever one the blocks have, is Megatron's and the original's.
        self.approximate = "tanh" if shape.own["bert_gelu"] == "tanh-all" else "none"

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return what is multiplied with the token embedding."""
        x_TH = functional.gelu(self.dense(x_TH), approximate=self.approximate)
        return self.norm(x_TH)  # type: ignore[no-any-return]


class Bert(BlockModel, MaskedLM):
    """Encoder; `hidden` returns its hidden states, `loss` the losses of its heads."""

    causal = False
    embeddings = (*BlockModel.embeddings, "type_embedding", "embedding_norm")

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
        part, own = self.part, shape.own
        self.post_norm: bool = own["bert_post_norm"]
        if part.embedding or (part.head and self.tied_parameters):
            self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        if part.embedding:
            self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
            if own["bert_token_types"]:
                self.type_embedding = Embedding(own["bert_token_types"], shape.hidden_size)
            if self.post_norm:
                self.embedding_norm = norm_of(shape, ops)
        gelu = "erf" if own["bert_gelu"] == "erf" else "gelu"
        self.blocks = self.build_blocks(ops, masked=True, post_norm=self.post_norm, activation=gelu)
        if part.head:
            if not self.post_norm:
                self.final_norm = norm_of(shape, ops)
            self.build_heads(ops)

    def build_heads(self, ops: OpBinding) -> None:
        """Build the heads for masked tokens and, if there is one, for the order."""
        shape = self.shape
        self.masked_head = MaskedHead(shape, ops)
        if shape.own["bert_binary_head"]:
            self.pooler = Linear(shape.hidden_size, shape.hidden_size, ops)
            self.order_head = Linear(shape.hidden_size, 2, ops)
        self.head_loss = HeadLoss(shape, ops, bias=True)

    @property
    def head_modules(self) -> dict[str, nn.Module]:
        """Modules of the heads by attribute name, without the token embedding."""
        return self.present("masked_head", "pooler", "order_head")

    @property
    def head_weight(self) -> Tensor:
        """Weight of the masked head, [V, H]."""
        return self.token_embedding.weight

    def hidden(
        self, tokens_BS: Tensor, types_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the last norm, [B, S, H].

        Args:
            tokens_BS: Token ids.
            types_BS: Segment of each token; None: the first.
            padding_BS: True at padding, which no token attends to; None: there is none.
        """
        x_BSH = self.embed(tokens_BS, types_BS)
        return self._last_norm(self.run_blocks(x_BSH, padding_BS))

    def embed(
        self,
        tokens_BS: Tensor,
        types_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states before the first block; see `hidden`."""
        places = positions_BS
        if places is None:
            places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH: Tensor = self.token_embedding(tokens_BS) + self.position_embedding(places)
        if self.shape.own["bert_token_types"]:
            types_BS = torch.zeros_like(tokens_BS) if types_BS is None else types_BS
            x_BSH = x_BSH + self.type_embedding(types_BS)
        if self.post_norm:
            x_BSH = self.embedding_norm(x_BSH)
        return functional.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def outputs(self, tokens_BS: Tensor, positions_BS: Tensor) -> list[Tensor]:
        """Return the logits of both heads, of tokens in all segments; see `Model`."""
        hidden_BSH = self.every_embedding(tokens_BS, positions_BS)
        every_BM = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        found = [self.masked_logits(hidden_BSH, every_BM)]
        return [*found, self.order_logits(hidden_BSH)] if hasattr(self, "pooler") else found

    def every_embedding(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Return the states of tokens in all segments, at given positions, [B, S, H].

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each.
        """
        segments = max(1, self.shape.own["bert_token_types"])
        types_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS) % segments
        return self._last_norm(self.run_blocks(self.embed(tokens_BS, types_BS, positions_BS)))

    def run_blocks(
        self,
        x_BSH: Tensor,
        padding_BS: Tensor | None = None,
        layers: Sequence[Callable[..., Tensor]] | None = None,
    ) -> Tensor:
        """Return the hidden states after some blocks.

        Args:
            x_BSH: Hidden states before them.
            padding_BS: True at padding; see `hidden`.
            layers: Blocks to run; None: all.
        """
        mask_B1SS = None
        if padding_BS is not None:
            mask_B1SS = padding_BS[:, None, None, :].expand(-1, 1, padding_BS.shape[1], -1)
        return self.run_layers(x_BSH, layers, mask_B1SS=mask_B1SS)

    def loss(self, **batch: Tensor) -> Tensor:
        """Return the losses of the masked tokens and of the order; see `Model.loss`.

        Args:
            batch: Tensors by the names of the family's batch:

                - tokens_BS: token ids, some of them masked;
                - types_BS: segment of each token;
                - padding_BS: True at padding;
                - chosen_BM: positions of the tokens to predict;
                - targets_BM: original tokens there;
                - loss_weight_BM: weight of each; 0 for samples with fewer than M;
                - order_B: 1 where the segments are swapped; with the order head only;
                - order_weight_B: weight of each sample in the order's loss.
        """
        return self.run_stage(None, batch, self.layers, last=True)

    def losses_of(self, hidden_BSH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the losses of hidden states after the last norm; see `loss`."""
        x_TH = self.masked_head(self._chosen(hidden_BSH, batch["chosen_BM"]))
        weight_VH, bias_V = self.head_weight, self.masked_head.bias
        target_T, weight_T = batch["targets_BM"].flatten(), batch["loss_weight_BM"].flatten()
        masked = self.head_loss(x_TH, weight_VH, target_T, weight_T, bias_V)
        found, accuracies = [masked], []
        if not self.training:
            best_T = self.head_loss.best(x_TH, weight_VH, bias_V)
            accuracies.append(((best_T == target_T) * weight_T).sum())
        if "order_B" in batch:
            order_B, weight_B = batch["order_B"], batch["order_weight_B"]
            logits_B2 = self.order_logits(hidden_BSH).to(masked.dtype)
            each_B = functional.cross_entropy(logits_B2, order_B, reduction="none")
            found.append((each_B * weight_B).sum())
            if not self.training:
                accuracies.append(((logits_B2.argmax(-1) == order_B) * weight_B).sum())
        values = [*found, *accuracies]
        return torch.stack(values) if len(values) > 1 else masked

    def masked_logits(self, hidden_BSH: Tensor, chosen_BM: Tensor) -> Tensor:
        """Return the logits of some tokens, [B, M, V].

        Args:
            hidden_BSH: Hidden states after the last norm.
            chosen_BM: Positions of the tokens.
        """
        x_TH = self.masked_head(self._chosen(hidden_BSH, chosen_BM))
        logits_TV = functional.linear(x_TH, self.head_weight, self.masked_head.bias)
        return logits_TV.view(*chosen_BM.shape, -1)

    def order_logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return the logits of segments in order and swapped, [B, 2]."""
        return self.order_head(torch.tanh(self.pooler(hidden_BSH[:, 0])))  # type: ignore[no-any-return]

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model: the blocks are split as in GPT."""
        replicated = [self.position_embedding] if self.part.embedding else []
        if self.part.embedding and self.shape.own["bert_token_types"]:
            replicated.append(self.type_embedding)
        return TensorParallelPlan(
            column=self.column_linears(),
            row=self.row_linears(),
            token_embedding=self.token_embedding if self.part.embedding else None,
            replicated_embeddings=replicated,
            head_norm=self._norm_before_heads if self.part.head else None,
            whole_heads=[self.order_head] if "order_head" in self._modules else [],
        )

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after a pipeline stage; the losses if it is the last."""
        x_BSH = hidden_BSH
        if x_BSH is None:
            x_BSH = self.embed(batch["tokens_BS"], batch.get("types_BS"))
        x_BSH = self.run_blocks(x_BSH, batch.get("padding_BS"), layers)
        if not last:
            return x_BSH
        return self.losses_of(self._last_norm(x_BSH), batch)

    @property
    def _norm_before_heads(self) -> LayerNorm | RMSNorm:
        return self.layers[-1].feed_forward_norm if self.post_norm else self.final_norm

    def _last_norm(self, x_BSH: Tensor) -> Tensor:
        return x_BSH if self.post_norm else self.final_norm(x_BSH)

    @staticmethod
    def _chosen(hidden_BSH: Tensor, chosen_BM: Tensor) -> Tensor:
        """Return the hidden states of some tokens, [B * M, H]."""
        index_BMH = chosen_BM.unsqueeze(-1).expand(-1, -1, hidden_BSH.shape[-1])
        return hidden_BSH.gather(1, index_BMH).flatten(0, 1)
