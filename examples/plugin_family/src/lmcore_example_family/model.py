"""The model of the family `window`.  Shapes: B batch, S sequence, H hidden, W width."""

import torch
from torch import nn
from torch.nn import functional

from lmcore.families.layers.head import HeadLoss
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.layers.transformer import norm_of
from lmcore.families.protocol import Model, TensorParallelPlan


class Mixer(nn.Module):
    """x + the W last tokens weighted by channel, then x + feed_forward(norm(x))."""

    def __init__(self, shape, ops):
        super().__init__()
        hidden, width = shape.hidden_size, shape.ffn_hidden_size
        self.taps = nn.Parameter(torch.zeros(shape.own["window_width"], hidden))
        self.norm = norm_of(shape, ops)
        self.up = Linear(hidden, width, ops, bias=False)
        self.down = Linear(width, hidden, ops, bias=False)

    def forward(self, x_BSH):
        """Return the residual stream after the layer."""
        length = x_BSH.shape[1]
        before = functional.pad(x_BSH, (0, 0, len(self.taps) - 1, 0))
        x_BSH = x_BSH + sum(
            tap_H * before[:, start : start + length] for start, tap_H in enumerate(self.taps)
        )
        return x_BSH + self.down(functional.gelu(self.up(self.norm(x_BSH))))


class WindowModel(Model):
    """Language model without attention."""

    def __init__(self, shape, ops, recompute, **options):
        super().__init__(shape, ops, recompute, **options)
        self.tokens = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.mixers = nn.ModuleList(Mixer(shape, ops) for _ in self.part.layers)
        self.head_loss = HeadLoss(shape, ops)

    @property
    def layers(self):
        """Layers, in order."""
        return list(self.mixers)

    @property
    def head_weight(self):
        """Weight of the head, [V, H]."""
        return self.tokens.weight

    def loss(self, tokens_BS, targets_BS, loss_weight_BS):
        """Return the sum over tokens of loss weight times cross entropy."""
        x_BSH = self.recompute.run_blocks(self.layers, self.tokens(tokens_BS))
        flat = (x_BSH.flatten(0, 1), self.head_weight, targets_BS.flatten())
        return self.head_loss(*flat, loss_weight_BS.flatten())

    def tensor_parallel_plan(self):
        """Return which projections are split, as the table of parameters says."""
        return TensorParallelPlan(
            column=[mixer.up for mixer in self.mixers],
            row=[mixer.down for mixer in self.mixers],
            token_embedding=self.tokens,
            head_norm=self.mixers[-1].norm,
        )
