"""torch's layers without their initialization: `Model.initialize` sets every weight.

torch's would be overwritten, and on the meta device it imports torch's compiler, 1.2 s at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    import torch

    from lmcore.families.op_binding import OpBinding

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
    """Lookup table; parameters are uninitialized.

    Attributes:
        output_dtype: Dtype of the rows that a lookup returns; None: the table's.
        of_tokens: True if its rows are states of tokens, which may be kept in a narrower dtype.
    """

    output_dtype: torch.dtype | None = None
    of_tokens: ClassVar[bool] = True

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of some ids."""
        rows = super().forward(ids)
        return rows if self.output_dtype is None else rows.to(self.output_dtype)

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""
