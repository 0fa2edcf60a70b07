"""torch's layers without their initialization: `Model.initialize` sets every weight.

torch's would be overwritten, and on the meta device it imports torch's compiler, 1.2 s at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding

__all__ = ["Embedding", "Linear"]


class Linear(nn.Linear):
    """Projection by the bound `linear`; parameters are uninitialized."""

    def __init__(
        self, in_features: int, out_features: int, ops: OpBinding, *, bias: bool = True
    ) -> None:
        """Bind the op for this size; for the arguments see `nn.Linear`."""
        super().__init__(in_features, out_features, bias=bias)
        self.op: Callable[..., Tensor] = ops.bind(
            "linear", in_features=in_features, out_features=out_features, bias=bias
        )

    def forward(self, x_BSI: Tensor) -> Tensor:
        """Project the last dim."""
        return self.op(x_BSI, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """Lookup table; parameters are uninitialized."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""
