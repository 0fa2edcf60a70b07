"""torch's layers without their own initialisation: `GPT.initialize` draws every weight.

Their random fill would be work thrown away, and on the meta device it imports torch's compiler,
1.2 s of a start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding

__all__ = ["Embedding", "Linear"]


class Linear(nn.Linear):
    """A projection by the bound `linear`; parameters are uninitialised."""

    def __init__(
        self, in_features: int, out_features: int, ops: OpBinding, *, bias: bool = True
    ) -> None:
        """Bind the op for this size."""
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
    """A lookup table; parameters are uninitialised."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""
