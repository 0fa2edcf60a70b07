"""Causal language model of the GPT and Llama families: embeddings, blocks, final norm and head.

By default it is GPT-2 as Megatron trains it: pre-normalization, learned positions, biases
everywhere but in the head, which is tied to the token embedding, and a padded vocabulary.  Llama's
parts are settings of `ModelShape`.  Shapes: B batch, S sequence, H hidden, V padded vocabulary,
T = B * S.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.model.cache import KeyValueCache, SlotCache
from lmcore.model.layers import Embedding
from lmcore.model.protocol import Arguments, CausalLM, Split, TensorParallelPlan
from lmcore.model.recompute import KEEP_ALL, Recompute
from lmcore.model.rotary import Rotation, rotation_of
from lmcore.model.transformer import Attention, Block, FeedForward, norm_of, output_std

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["GPT"]

_SAMPLED_TOKENS = 1024
"""Tokens whose logits are in memory at once when targets are sampled."""


class GPT(CausalLM):
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
        if part.embedding or (part.head and shape.tied):
            self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        if part.embedding and shape.learned_positions:
            self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleDict(
            {
                str(number): Block(
                    shape, ops, recompute.attention, masked=masked, causal=self.causal
                )
                for number in part.layers
            }
        )
        if part.head:
            self.final_norm = norm_of(shape, ops)
            if not shape.tied:
                self.output_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
            self.linear_cross_entropy = ops.bind(
                "linear_cross_entropy",
                vocab_size=shape.padded_vocab_size,
                hidden_size=shape.hidden_size,
            )

    @property
    def layers(self) -> list[Block]:
        """Blocks of this part, in order."""
        return [cast("Block", block) for block in self.blocks.values()]

    @property
    def attentions(self) -> list[Attention]:
        """Attention module of each block."""
        return [block.attention for block in self.layers]

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""
        rows = self.token_embedding if self.shape.tied else self.output_embedding
        return rows.weight

    @property
    def tied_parameters(self) -> frozenset[str]:
        """Token embedding, if the head uses its weight."""
        return frozenset({"token_embedding.weight"} if self.shape.tied else ())

    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return the initial value of a whole parameter in float32, on the CPU.

        Matrices are drawn from N(0, sigma), and from N(0, sigma / sqrt(2 l)) if they write to the
        residual stream; gains are 1, biases and offsets 0.

        Args:
            name: Name of the parameter.
            size: Size of the whole parameter.
            seed: Seed of the run.
        """
        if len(size) < 2:
            return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0)
        residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        std = output_std(self.shape) if residual else self.shape.init_method_std
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(size, dtype=torch.float32).normal_(0.0, std, generator=generator)

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
        if cache is None:
            x_BSH = self.run_blocks(x_BSH, documents_BS, rotation=rotation)
        else:
            for block, layer_cache in zip(self.layers, cache.layers, strict=True):
                # Bypasses a compiled block, which would recompile for every length of the cache.
                x_BSH = block._call_impl(  # type: ignore[no-untyped-call]  # noqa: SLF001
                    x_BSH, layer_cache, cache.mask_B11T, rotation=rotation
                )
        return self.final_norm(x_BSH) if self.part.head else x_BSH

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the hidden states before the first layer.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its index in the sequence.
        """
        x_BSH: Tensor = self.token_embedding(tokens_BS)
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

    def run_blocks(
        self,
        x_BSH: Tensor,
        documents_BS: Tensor | None = None,
        layers: Sequence[Callable[..., Tensor]] | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Return the hidden states after some layers.

        Args:
            x_BSH: Hidden states before the layers.
            documents_BS: Number of each token's document; see `forward`.
            layers: Layers to run; None: all.
            rotation: Rotation of queries and keys; see `rotation`.
        """
        blocks: list[Callable[..., Tensor]] = list(self.layers if layers is None else layers)
        if rotation is not None:
            blocks = [functools.partial(block, rotation=rotation) for block in blocks]
        if documents_BS is not None:
            assert self.masked, "attention was bound without a mask"
            mask_B1SS = self.document_mask(documents_BS)
            blocks = [functools.partial(block, mask_B1SS=mask_B1SS) for block in blocks]
        if self.training:
            return self.recompute.run_blocks(blocks, x_BSH)
        for block in blocks:
            x_BSH = block(x_BSH)
        return x_BSH

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None,
        loss_weight_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over tokens of loss weight times cross entropy, a float32 scalar.

        Args:
            tokens_BS: Token ids.
            targets_BS: Next token of each; None: sampled from the model's own predictions.
            loss_weight_BS: Weight of each token's cross entropy.
            positions_BS: Position of each token; see `forward`.
            documents_BS: Number of each token's document; see `forward`.
        """
        hidden_BSH = self(tokens_BS, positions_BS=positions_BS, documents_BS=documents_BS)
        if targets_BS is None:
            targets_BS = self.sampled_targets(hidden_BSH)
        return self.loss_of(hidden_BSH, targets_BS, loss_weight_BS)

    def loss_of(self, hidden_BSH: Tensor, targets_BS: Tensor, loss_weight_BS: Tensor) -> Tensor:
        """Return the loss of hidden states after the final norm; see `loss`."""
        return self.linear_cross_entropy(
            hidden_BSH.flatten(0, 1),
            self.head_weight,
            targets_BS.flatten(),
            loss_weight_BS.flatten(),
        )

    @torch.no_grad()
    def sampled_targets(self, hidden_BSH: Tensor) -> Tensor:
        """Return a token for each position, drawn from the model's prediction, [B, S].

        Args:
            hidden_BSH: Hidden states after the final norm.
        """
        drawn = []
        for part_TH in hidden_BSH.flatten(0, 1).split(_SAMPLED_TOKENS):
            logits_TV = self.logits(part_TH).float()
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
        splits = {"token_embedding.weight": Split(0), "output_embedding.weight": Split(0)}
        for prefix, module in self.named_modules():
            if isinstance(module, Attention | FeedForward):
                splits |= {f"{prefix}.{name}": split for name, split in module.splits.items()}
        names = {name for name, _ in self.named_parameters()}
        pairs = [(block.attention, block.feed_forward) for block in self.layers]
        embedding = self.part.embedding
        return TensorParallelPlan(
            splits={name: split for name, split in splits.items() if name in names},
            column=[linear for attn, ffn in pairs for linear in (attn.qkv, ffn.up)],
            row=[linear for attn, ffn in pairs for linear in (attn.output, ffn.down)],
            token_embedding=self.token_embedding if embedding else None,
            position_embedding=self.position_embedding
            if embedding and self.shape.learned_positions
            else None,
            head_norm=self.final_norm if self.part.head else None,
        )

    def stage_modules(self, *, first: bool, last: bool) -> dict[str, nn.Module]:
        """Return embeddings, final norm and head, as far as the stage has them."""
        shape = self.shape
        modules: dict[str, nn.Module] = {}
        if first or (last and shape.tied):
            modules["token_embedding"] = self.token_embedding
        if first and shape.learned_positions:
            modules["position_embedding"] = self.position_embedding
        if last:
            modules["final_norm"] = self.final_norm
            if not shape.tied:
                modules["output_embedding"] = self.output_embedding
        return modules

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        arguments: Arguments,
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after a pipeline stage; the loss if it is the last."""
        (tokens_BS, *targets), options = arguments
        positions = options.get("positions_BS")
        x_BSH = self.embed(tokens_BS, positions) if hidden_BSH is None else hidden_BSH
        rotation = self.rotation(tokens_BS, positions, x_BSH.dtype)
        x_BSH = self.run_blocks(x_BSH, options.get("documents_BS"), layers, rotation=rotation)
        return self.loss_of(self.final_norm(x_BSH), *targets) if last else x_BSH


def _positions(tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
    if positions_BS is not None:
        return positions_BS
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
