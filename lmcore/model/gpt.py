"""GPT: token and position embeddings, blocks, a final norm, and a head tied to the embedding.

Follows GPT-2 as Megatron trains it: normalization before each branch, learned positions, biases
everywhere but in the head, vocabulary padded.  Shapes: B batch, S sequence, H hidden, V padded
vocabulary, T = B * S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.model.cache import KeyValueCache
from lmcore.model.layers import Embedding
from lmcore.model.recompute import KEEP_ALL, Recompute
from lmcore.model.transformer import Block, LayerNorm, output_std

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["GPT"]


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
    ) -> None:
        """Build the model; parameters are uninitialised until `initialize`.

        Args:
            shape: Numbers of layers, channels and so on.
            ops: Where the kernels come from.
            recompute: How layers and their attention run in training.
            masked: Whether attention may be limited to documents.
        """
        super().__init__()
        self.shape, self.masked = shape, masked
        self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleList(
            Block(shape, ops, recompute.attention, masked=masked) for _ in range(shape.num_layers)
        )
        self.final_norm = LayerNorm(shape, ops)
        self.recompute = recompute
        self.linear_cross_entropy: Callable[..., Tensor] = ops.bind(
            "linear_cross_entropy",
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.hidden_size,
        )

    def initialize(self, seed: int) -> None:
        """Draw every weight from N(0, sigma) on the CPU with a generator of its own.

        The result depends on the seed and the shape alone, not on the device or on any other
        random state.  Gains are 1 and offsets 0.
        """
        generator = torch.Generator().manual_seed(seed)
        narrow = output_std(self.shape)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                    continue
                residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
                std = narrow if residual else self.shape.init_method_std
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(0.0, std, generator=generator))

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
        start = cache.length if cache is not None else 0
        places = positions_BS
        if places is None:
            places = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.token_embedding(tokens_BS) + self.position_embedding(places)
        x_BSH = functional.dropout(x_BSH, self.shape.hidden_dropout, self.training)
        if cache is not None:
            for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
                x_BSH = block(x_BSH, layer_cache)
            return self.final_norm(x_BSH)  # type: ignore[no-any-return]
        blocks: list[Callable[[Tensor], Tensor]] = list(self.blocks)
        if documents_BS is not None:
            assert self.masked, "attention was bound without a mask"
            hidden_B1SS = documents_BS[:, None, :, None] != documents_BS[:, None, None, :]
            blocks = [functools.partial(block, mask_B1SS=hidden_B1SS) for block in self.blocks]
        if self.training:
            x_BSH = self.recompute.run_blocks(blocks, x_BSH)
        else:
            for run in blocks:
                x_BSH = run(x_BSH)
        return self.final_norm(x_BSH)  # type: ignore[no-any-return]

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        loss_weight_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over tokens of loss_weight times the cross entropy, a float32 scalar.

        See `forward` for the arguments by name.
        """
        hidden_BSH = self(tokens_BS, positions_BS=positions_BS, documents_BS=documents_BS)
        return self.linear_cross_entropy(
            hidden_BSH.flatten(0, 1),
            self.token_embedding.weight,
            targets_BS.flatten(),
            loss_weight_BS.flatten(),
        )

    def logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return scores over the padded vocabulary."""
        return functional.linear(hidden_BSH, self.token_embedding.weight)

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KeyValueCache:
        """Return an empty cache on the model's device."""
        return KeyValueCache(
            num_layers=self.shape.num_layers,
            batch=batch,
            num_heads=self.shape.num_attention_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            device=self.token_embedding.weight.device,
            dtype=dtype,
        )

    def parameter_count(self) -> int:
        """Return the number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())
