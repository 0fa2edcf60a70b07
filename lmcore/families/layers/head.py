"""`HeadLoss`: cross entropy of the product with a head's weight, over the vocabulary's own rows.

Shapes: T tokens, H hidden, V rows of the weight, I = H and the columns of a bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["HeadLoss", "with_bias"]

_COLUMNS = 8
"""Columns that give a bias to a product without one: the bias, and zeros for an aligned width."""
_NEVER = -1e4
"""Bias of rows that pad the vocabulary: their probability is 0 in every precision."""


class HeadLoss:
    """`linear_cross_entropy` with the arguments of the op and a bias.

    Rows that pad the vocabulary take no part in the softmax, so that a loss does not depend on
    their number, unless the shape counts them.

    Attributes:
        vocab_size: Number of rows that count; 0: all.
    """

    def __init__(self, shape: ModelShape, ops: OpBinding, *, bias: bool = False) -> None:
        """Bind the op.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            bias: True if calls have a bias.
        """
        self.vocab_size = shape.vocab_size
        wide = bias or 0 < self.vocab_size < shape.padded_vocab_size
        self.op = ops.bind(
            "linear_cross_entropy",
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.hidden_size + (_COLUMNS if wide else 0),
        )

    def __call__(
        self,
        x_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of loss weight times the cross entropy of x @ weight.T + bias."""
        x_TI, weight_VI = self._with_bias(x_TH, weight_VH, bias_V)
        loss: Tensor = self.op(x_TI, weight_VI, target_T, loss_weight_T)
        return loss

    def best(self, x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Return the row with the largest product for each token, [T]."""
        x_TI, weight_VI = self._with_bias(x_TH, weight_VH, bias_V)
        return functional.linear(x_TI, weight_VI).argmax(-1)

    def scores(
        self, x_TH: Tensor, weight_VH: Tensor, target_T: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target, [T], and whether it is the most probable row.

        Args:
            x_TH: Hidden states.
            weight_VH: Weight of the head.
            target_T: Row of each target.
            vocab_size: Number of rows of the whole vocabulary that may be predicted.
        """
        logits_TV = functional.linear(x_TH, weight_VH)[:, :vocab_size].float()
        logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None]).squeeze(1)
        return logprob_T, logits_TV.argmax(-1) == target_T

    def _with_bias(
        self, x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = weight_VH.shape[0]
        if 0 < self.vocab_size < rows:
            padding_V = weight_VH.new_zeros(rows)
            padding_V[self.vocab_size :] = _NEVER
            bias_V = padding_V if bias_V is None else bias_V + padding_V
        return (x_TH, weight_VH) if bias_V is None else with_bias(x_TH, weight_VH, bias_V)


def with_bias(x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors whose product has a bias: [T, I] and [V, I]."""
    x_TI = torch.cat([x_TH, x_TH.new_ones(len(x_TH), 1)], dim=1)
    weight_VI = torch.cat([weight_VH, bias_V.to(weight_VH.dtype).unsqueeze(-1)], dim=1)
    zeros = (0, _COLUMNS - 1)
    return functional.pad(x_TI, zeros), functional.pad(weight_VI, zeros)
