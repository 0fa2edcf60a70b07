"""Causal language model of the GPT and Llama families: embeddings, blocks, final norm and head.

By default it is GPT-2 as Megatron trains it: pre-normalization, learned positions, biases
everywhere but in the head, which is tied to the token embedding, and a padded vocabulary.  Llama's
parts are settings of `ModelShape`.  Shapes: B batch, S sequence, H hidden, V padded vocabulary,
T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.block_model import BlockModel
from lmcore.families.layers.attention_bias import Alibi, alibi_slopes
from lmcore.families.layers.cache import KeyValueCache, SlotCache
from lmcore.families.layers.head import HeadLoss
from lmcore.families.layers.projection import Embedding
from lmcore.families.layers.rotary import Rotation, rotation_of
from lmcore.families.layers.transformer import LayerNorm, norm_of
from lmcore.families.protocol import CausalLM, TensorParallelPlan
from lmcore.families.recompute import KEEP_ALL, Recompute

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["GPT"]

_SAMPLED_TOKENS = 1024
"""Tokens whose logits are in memory at once when targets are sampled."""


class GPT(BlockModel, CausalLM):
    """Causal language model; `forward` returns hidden states, `loss` and `logits` are its heads."""

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
        part = self.part
        self._first_head, self._all_heads = 0, shape.num_attention_heads
        if part.embedding or (part.head and self.tied_parameters):
            self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        if part.embedding and shape.embed_layernorm:
            self.embedding_norm = LayerNorm(shape, ops)
        if part.embedding and shape.learned_positions:
            self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.blocks = self.build_blocks(ops, masked=masked)
        if part.head:
            self.final_norm = norm_of(shape, ops)
            self.build_heads(ops)

    def build_heads(self, ops: OpBinding) -> None:
        """Build the language-model head."""
        shape = self.shape
        if not shape.tied:
            self.output_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.head_loss = HeadLoss(shape, ops)

    @property
    def head_modules(self) -> dict[str, nn.Module]:
        """Modules of the heads by attribute name, without the token embedding."""
        return self.present("output_embedding")

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""
        rows = self.token_embedding if self.shape.tied else self.output_embedding
        return rows.weight

    def forward(
        self,
        tokens_BS: Tensor,
        cache: KeyValueCache | None = None,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        hidden_BSH: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, [B, S, H].

        A part of a model without the head returns those after its last layer.

        Args:
            tokens_BS: Token ids.
            cache: Keys and values of the tokens before these; extended in place.
            positions_BS: Position of each token; None: its index in the sequence, or the cache's.
            documents_BS: Number of each token's document, beyond which it does not attend; only if
                the model was built with *masked*, and without *cache*.
            hidden_BSH: Hidden states of the part of the model before this one; None: this one
                embeds the tokens.
        """
        if cache is not None:
            assert self.causal, "a cache needs causal attention"
            assert cache.mask_B11T is None or self.masked, "attention was bound without a mask"
            positions_BS = cache.positions
        x_BSH = self.embed(tokens_BS, positions_BS) if hidden_BSH is None else hidden_BSH
        rotation = self.rotation(tokens_BS, positions_BS, x_BSH.dtype)
        alibi = self.alibi(x_BSH, cache)
        if cache is None:
            x_BSH = self.run_blocks(x_BSH, documents_BS, rotation=rotation, alibi=alibi)
        else:
            for block, layer_cache in zip(self.layers, cache.layers, strict=True):
                # Bypasses a compiled block, which would recompile for every length of the cache.
                x_BSH = block._call_impl(  # type: ignore[no-untyped-call]  # noqa: SLF001
                    x_BSH, layer_cache, cache.mask_B11T, rotation=rotation, alibi=alibi
                )
        return self.final_norm(x_BSH) if self.part.head else x_BSH

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the hidden states before the first layer.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its index in the sequence.
        """
        x_BSH: Tensor = self.token_embedding(tokens_BS)
        if self.shape.embed_layernorm:
            x_BSH = self.embedding_norm(x_BSH)
        if self.shape.learned_positions:
            x_BSH = x_BSH + self.position_embedding(_positions(tokens_BS, positions_BS))
        return functional.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def rotation(
        self, tokens_BS: Tensor, positions_BS: Tensor | None, dtype: torch.dtype
    ) -> Rotation | None:
        """Return the rotation of queries and keys in all layers; None without rotary positions.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its index in the sequence.
            dtype: Dtype of the hidden states.
        """
        if not self.shape.rotary:
            return None
        return rotation_of(_positions(tokens_BS, positions_BS), self.shape, dtype)

    def divide_heads(self, rank: int, size: int) -> None:
        """Take the slopes of a rank's heads; see `Model`."""
        heads = self.shape.num_attention_heads
        self._first_head, self._all_heads = rank * heads, size * heads

    def alibi(self, x_BSH: Tensor, cache: KeyValueCache | None = None) -> Alibi | None:
        """Return the bias of attention in all layers; None if the shape has none.

        Args:
            x_BSH: Hidden states.
            cache: Keys and values of the tokens before; None: the queries are the last keys.
        """
        if not self.shape.alibi:
            return None
        wide = torch.promote_types(x_BSH.dtype, torch.float32)
        slope_A = alibi_slopes(self._all_heads, wide, x_BSH.device)
        slope_N = slope_A.narrow(0, self._first_head, self.shape.num_attention_heads)
        if cache is None:
            return Alibi(slope_N)
        return Alibi(slope_N, cache.positions, cache.key_positions_BT)

    def run_blocks(
        self,
        x_BSH: Tensor,
        documents_BS: Tensor | None = None,
        layers: Sequence[Callable[..., Tensor]] | None = None,
        *,
        rotation: Rotation | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Return the hidden states after some layers.

        Args:
            x_BSH: Hidden states before the layers.
            documents_BS: Number of each token's document; see `forward`.
            layers: Layers to run; None: all.
            rotation: Rotation of queries and keys; see `rotation`.
            alibi: Bias of attention; see `alibi`.
        """
        mask_B1SS = None
        if documents_BS is not None:
            assert self.masked, "attention was bound without a mask"
            mask_B1SS = self.document_mask(documents_BS)
        return self.run_layers(x_BSH, layers, rotation=rotation, alibi=alibi, mask_B1SS=mask_B1SS)

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        loss_weight_BS: Tensor | None = None,
        **given: Tensor,
    ) -> Tensor:
        """Return the sum over tokens of loss weight times cross entropy, a float32 scalar.

        Args:
            tokens_BS: Token ids.
            targets_BS: Next token of each; None: sampled from the model's own predictions.
            loss_weight_BS: Weight of each token's cross entropy; None: 1.
            **given: Further tensors of the micro-batch, which `forward` takes.
        """
        hidden_BSH = self(tokens_BS, **given)
        if targets_BS is None:
            targets_BS = self.sampled_targets(hidden_BSH)
        if loss_weight_BS is None:
            loss_weight_BS = torch.ones(targets_BS.shape, device=targets_BS.device)
        return self.loss_of(hidden_BSH, targets_BS, loss_weight_BS)

    def loss_of(self, hidden_BSH: Tensor, targets_BS: Tensor, loss_weight_BS: Tensor) -> Tensor:
        """Return the loss of hidden states after the final norm; see `loss`."""
        return self.head_loss(
            hidden_BSH.flatten(0, 1),
            self.head_weight,
            targets_BS.flatten(),
            loss_weight_BS.flatten(),
        )

    def losses_of(self, hidden_BSH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the losses of hidden states after the final norm; see `loss`."""
        return self.loss_of(hidden_BSH, batch["targets_BS"], batch["loss_weight_BS"])

    @torch.no_grad()
    def sampled_targets(self, hidden_BSH: Tensor) -> Tensor:
        """Return a token for each position, drawn from the model's prediction, [B, S].

        Args:
            hidden_BSH: Hidden states after the final norm.
        """
        drawn = []
        for part_TH in hidden_BSH.flatten(0, 1).split(_SAMPLED_TOKENS):
            logits_TV = self.logits(part_TH).float()[:, : self.shape.vocab_size or None]
            # The largest logit after adding Gumbel noise is a draw from the softmax.
            noise_TV = torch.empty_like(logits_TV).exponential_().log_()
            drawn.append((logits_TV - noise_TV).argmax(dim=-1))
        return torch.cat(drawn).view(hidden_BSH.shape[:-1])

    def logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return the logits of the padded vocabulary."""
        if self.head_projection is not None:
            return self.head_projection(hidden_BSH)
        return functional.linear(hidden_BSH, self.head_weight)

    def new_cache(self, dtype: torch.dtype) -> SlotCache:
        """Return an empty cache on the model's device."""
        return SlotCache(
            num_layers=len(self.layers),
            num_heads=self.shape.num_query_groups,
            head_dim=self.shape.head_dim,
            device=self.device,
            dtype=dtype,
        )

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model: Megatron's (Shoeybi et al., 2019)."""
        embedding = self.part.embedding
        return TensorParallelPlan(
            column=self.column_linears(),
            row=self.row_linears(),
            token_embedding=self.token_embedding if embedding else None,
            replicated_embeddings=[self.position_embedding]
            if embedding and self.shape.learned_positions
            else [],
            head_norm=self.final_norm if self.part.head else None,
        )

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after a pipeline stage; the loss if it is the last."""
        tokens_BS, positions = batch["tokens_BS"], batch.get("positions_BS")
        x_BSH = self.embed(tokens_BS, positions) if hidden_BSH is None else hidden_BSH
        rotation = self.rotation(tokens_BS, positions, x_BSH.dtype)
        alibi, documents = self.alibi(x_BSH), batch.get("documents_BS")
        x_BSH = self.run_blocks(x_BSH, documents, layers, rotation=rotation, alibi=alibi)
        if not last:
            return x_BSH
        return self.losses_of(self.final_norm(x_BSH), batch)


def _positions(tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
    if positions_BS is not None:
        return positions_BS
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
