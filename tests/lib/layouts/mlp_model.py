"""Model of another family, for tests: no attention, no positions, a residual MLP on each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.layers.head import HeadLoss
from lmcore.families.layers.parameters import norm_rows
from lmcore.families.layers.projection import Embedding
from lmcore.families.layers.transformer import FeedForward, norm_of
from lmcore.families.protocol import Model
from lmcore.model.family import Family, families
from lmcore.model.parameters import ZEROS, Init, Parameter
from lmcore.model.shape import ModelShape


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
        self.head_loss = HeadLoss(shape, ops)

    @property
    def layers(self) -> list[nn.Module]:
        """Layers, in order."""
        return list(self.body)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""
        return self.head.weight

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor, loss_weight_BS: Tensor) -> Tensor:
        """Return the weighted sum of the cross entropies, a float32 scalar."""
        x_BSH = functional.embedding(tokens_BS, self.embedding.weight)
        x_BSH = self.recompute.run_blocks(self.layers, x_BSH)
        return self.head_loss(
            x_BSH.flatten(0, 1), self.head.weight, targets_BS.flatten(), loss_weight_BS.flatten()
        )


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters."""
    wide = Init(std=0.2)
    rows, (hidden, width) = shape.padded_vocab_size, (shape.hidden_size, shape.ffn_hidden_size)
    table = [Parameter("embedding.weight", (rows, hidden), wide)]
    for layer in range(shape.num_layers):
        feed_forward = f"body.{layer}.feed_forward"
        table += [
            *norm_rows(f"body.{layer}.norm", shape),
            Parameter(f"{feed_forward}.up.weight", (width, hidden), wide),
            Parameter(f"{feed_forward}.up_bias", (width,), ZEROS),
            Parameter(f"{feed_forward}.down.weight", (hidden, width), wide),
            Parameter(f"{feed_forward}.down_bias", (hidden,), ZEROS),
        ]
    return [*table, Parameter("head.weight", (rows, hidden), wide)]


def replace_gpt() -> Family:
    """Return GPT's record with this model, for the registry."""
    usual = families()["GPT"]
    return replace(usual, parameters=parameters, model="layouts.mlp_model:MLPModel")
