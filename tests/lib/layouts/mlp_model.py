"""Model of another family, for tests: no attention, no positions, a residual MLP on each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.model.layers import Embedding
from lmcore.model.protocol import Model
from lmcore.model.transformer import FeedForward, norm_of


class Layer(nn.Module):
    """x + feed_forward(norm(x))."""

    def __init__(self, shape: Any, ops: Any) -> None:
        super().__init__()
        self.norm = norm_of(shape, ops)
        self.feed_forward = FeedForward(shape, ops)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the residual stream after the branch."""
        bias = self.feed_forward.down_bias
        assert bias is not None
        return x_BSH + self.feed_forward(self.norm(x_BSH)) + bias


class MLPModel(Model):
    """Language model that predicts each token from the one before it."""

    causal = False

    def __init__(self, shape: Any, ops: Any, recompute: Any = None, **options: Any) -> None:
        super().__init__(shape, ops, recompute, **options)
        self.embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.body = nn.ModuleList(Layer(shape, ops) for _ in range(shape.num_layers))
        self.head = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.linear_cross_entropy = ops.bind(
            "linear_cross_entropy",
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.hidden_size,
        )

    @property
    def layers(self) -> list[nn.Module]:
        """Layers, in order."""
        return list(self.body)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""
        return self.head.weight

    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return ones for gains, zeros for biases, and matrices drawn from N(0, 0.2)."""
        if len(size) < 2:
            return torch.full(size, 1.0 if name.endswith("norm.weight") else 0.0)
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        return torch.empty(size).normal_(0.0, 0.2, generator=generator)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor, loss_weight_BS: Tensor) -> Tensor:
        """Return the weighted sum of the cross entropies, a float32 scalar."""
        x_BSH = functional.embedding(tokens_BS, self.embedding.weight)
        x_BSH = self.recompute.run_blocks(self.layers, x_BSH)
        return self.linear_cross_entropy(
            x_BSH.flatten(0, 1), self.head.weight, targets_BS.flatten(), loss_weight_BS.flatten()
        )
