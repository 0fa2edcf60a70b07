"""The causal language model: embeddings, blocks, a final norm, and a head.

By itself it is GPT-2 as Megatron trains it: normalization before each branch, learned positions,
biases everywhere but in the head, which is tied to the embedding, and a padded vocabulary.  Llama's
parts are settings of its shape.  Shapes: B batch, S sequence, H hidden, V padded vocabulary,
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

from lmcore.model.cache import KeyValueCache
from lmcore.model.layers import Embedding
from lmcore.model.recompute import KEEP_ALL, Recompute
from lmcore.model.rotary import Rotation, rotation_of
from lmcore.model.shape import ModelPart
from lmcore.model.transformer import Block, norm_of, output_std

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["GPT", "initial_weight"]

_SAMPLED_AT_ONCE = 1024
"""Tokens whose scores are held together when targets are drawn."""


class GPT(nn.Module):
    """A causal language model.

    `forward` gives hidden states; `loss` and `logits` are the two heads on them.
    """

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        recompute: Recompute = KEEP_ALL,
        *,
        masked: bool = False,
        part: ModelPart | None = None,
    ) -> None:
        """Build the model; parameters are uninitialised until `initialize`.

        Args:
            shape: Numbers of layers, channels and so on.
            ops: Where the kernels come from.
            recompute: How layers and their attention run in training.
            masked: Whether attention may be limited to documents.
            part: What of the model to build; None: all.
        """
        super().__init__()
        part = part or ModelPart.whole(shape)
        self.shape, self.masked, self.part = shape, masked, part
        if part.embedding or (part.head and shape.tied):
            self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        if part.embedding and shape.learned_positions:
            self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleDict(
            {
                str(number): Block(shape, ops, recompute.attention, masked=masked)
                for number in part.layers
            }
        )
        self.recompute = recompute
        if part.head:
            self.final_norm = norm_of(shape, ops)
            if not shape.tied:
                self.output_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
            self.linear_cross_entropy: Callable[..., Tensor] = ops.bind(
                "linear_cross_entropy",
                vocab_size=shape.padded_vocab_size,
                hidden_size=shape.hidden_size,
            )

    @property
    def layers(self) -> list[Block]:
        """The blocks, in their order."""
        return [cast("Block", block) for block in self.blocks.values()]

    @property
    def head_weight(self) -> Tensor:
        """What hidden states are multiplied with to give scores, [V, H]."""
        rows = self.token_embedding if self.shape.tied else self.output_embedding
        return rows.weight

    def initialize(self, seed: int) -> None:
        """Give every weight its initial value; see `initial_weight`."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial_weight(name, parameter.shape, self.shape, seed))

    def forward(
        self,
        tokens_BS: Tensor,
        cache: KeyValueCache | None = None,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm.

        Args:
            tokens_BS: Token ids.
            cache: Keys and values of the tokens before these; extended in place.
            positions_BS: Position of each token; None: its place in the sequence.
            documents_BS: A number for each token's document, beyond which it does not attend; of
                a model that was built `masked`, without *cache*.
        """
        start = cache.length if cache else 0
        x_BSH = self.embed(tokens_BS, positions_BS, start=start)
        rotation = self.rotation(tokens_BS, positions_BS, x_BSH.dtype, start=start)
        if cache is None:
            x_BSH = self.run_blocks(x_BSH, documents_BS, rotation=rotation)
        else:
            for block, layer_cache in zip(self.layers, cache.layers, strict=True):
                # Not what `compile` has made of the block: with a cache it would be compiled anew
                # for every token, as the lengths are part of it.
                x_BSH = block._call_impl(x_BSH, layer_cache, rotation=rotation)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return self.final_norm(x_BSH)  # type: ignore[no-any-return]

    def embed(
        self, tokens_BS: Tensor, positions_BS: Tensor | None = None, *, start: int = 0
    ) -> Tensor:
        """Return the hidden states before the first layer.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its place in the sequence.
            start: Place of the first token.
        """
        x_BSH: Tensor = self.token_embedding(tokens_BS)
        if self.shape.learned_positions:
            x_BSH = x_BSH + self.position_embedding(_places(tokens_BS, positions_BS, start))
        return functional.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def rotation(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None,
        dtype: torch.dtype,
        *,
        start: int = 0,
    ) -> Rotation | None:
        """Return what all layers turn queries and keys by; None where positions are not rotary.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its place in the sequence.
            dtype: Of the hidden states.
            start: Place of the first token.
        """
        if not self.shape.rotary:
            return None
        return rotation_of(_places(tokens_BS, positions_BS, start), self.shape, dtype)

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
            x_BSH: Those before.
            documents_BS: See `forward`.
            layers: Some of the blocks; None: all.
            rotation: See `rotation`.
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
        for run in blocks:
            x_BSH = run(x_BSH)
        return x_BSH

    @staticmethod
    def document_mask(documents_BS: Tensor) -> Tensor:
        """Return True where a token of another document is hidden, [B, 1, S, S]."""
        return documents_BS[:, None, :, None] != documents_BS[:, None, None, :]

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None,
        loss_weight_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over tokens of loss_weight times the cross entropy, a float32 scalar.

        Without targets they are drawn from the model's own predictions.  See `forward` for the
        arguments by name.
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
        """Return a token for each position, drawn from the model's prediction there."""
        drawn = []
        for part_TH in hidden_BSH.flatten(0, 1).split(_SAMPLED_AT_ONCE):
            scores_TV = self.logits(part_TH).float()
            # The highest score after Gumbel noise is a draw from their softmax.
            noise_TV = torch.empty_like(scores_TV).exponential_().log_()
            drawn.append((scores_TV - noise_TV).argmax(dim=-1))
        return torch.cat(drawn).view(hidden_BSH.shape[:-1])

    def logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return scores over the padded vocabulary."""
        return functional.linear(hidden_BSH, self.head_weight)

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KeyValueCache:
        """Return an empty cache on the model's device."""
        return KeyValueCache(
            num_layers=self.shape.num_layers,
            batch=batch,
            num_heads=self.shape.num_query_groups,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            device=self.token_embedding.weight.device,
            dtype=dtype,
        )

    def parameter_count(self) -> int:
        """Return the number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _places(tokens_BS: Tensor, positions_BS: Tensor | None, start: int) -> Tensor:
    if positions_BS is not None:
        return positions_BS
    return torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)


def initial_weight(name: str, size: torch.Size, shape: ModelShape, seed: int) -> Tensor:
    """Return a parameter's initial value in float32, on the CPU.

    Matrices are drawn from N(0, sigma), those that write to the residual stream with sigma /
    sqrt(2 l); gains are 1, biases and offsets 0.  It depends on name, size, *shape* and *seed*
    alone: not on the device, on other parameters or on any other random state.

    Args:
        name: Of the parameter in the model.
        size: Of the whole parameter.
        shape: The model's; sigma and the number of layers are used.
        seed: The run's.
    """
    if len(size) < 2:
        return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0)
    residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    std = output_std(shape) if residual else shape.init_method_std
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(size, dtype=torch.float32).normal_(0.0, std, generator=generator)
