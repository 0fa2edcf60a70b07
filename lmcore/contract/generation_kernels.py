"""Records for generation: projections by constant weights, and attention to a cache.

Importing this loads no torch.

Shapes: M rows, O outputs, I inputs, G groups of inputs that share a scale, B sequences, N query
heads, K heads of keys and values, D channels of a head, L >= B slots, C positions of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ConstantProjection", "NextTokenAttention", "Projection", "QuantizedWeight"]


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight [O, I] in integers: `values * scale + offset`, inputs in G groups of equal size.

    Attributes:
        bits: Bits of a value: 8 or 4.
        values_OI: int8, from -127 to 127 with 8 bits, from -8 to 7 with 4 bits.
        scale_OG: Scale of each group, in the dtype of the products.
        offset_OG: Offset of each group, in the same dtype; None: zero.
    """

    bits: int
    values_OI: Tensor
    scale_OG: Tensor
    offset_OG: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return int(self.values_OI.shape[1]) // int(self.scale_OG.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and offsets."""
        tables = self.scale_OG.nbytes * (1 if self.offset_OG is None else 2)
        return int(self.values_OI.numel()) * self.bits // 8 + int(tables)


Projection = Callable[["Tensor"], "Tensor"]
"""Function of rows [M, I] in any floating-point dtype that gives [M, O]; M of several dims.

Rows may have gaps between them in memory."""


@dataclass(frozen=True)
class ConstantProjection:
    """Projection by a weight that does not change: `activation(x @ weight.T + bias)`.

    Products are in the dtype of the weight, or of its scales, or more precise: a kernel rounds the
    inputs to that dtype or not.  A row of quantized weights does not depend on the other rows.

    Attributes:
        weight_OI: Weight, or the same quantized.
        bias_O: Bias; None: none.
        output: Dtype of the outputs.
        rows: Usual number of rows.
        activation: `gelu_tanh`; None: none.  A device that does not include it returns None, and is
            asked again without it.
    """

    weight_OI: Tensor | QuantizedWeight
    bias_O: Tensor | None
    output: torch.dtype
    rows: int = 1
    activation: str | None = None


class NextTokenAttention(Protocol):
    """Attention of one new token of each sequence over its slot of a key-value cache."""

    def __call__(
        self,
        q_BND: Tensor,
        k_BKD: Tensor,
        v_BKD: Tensor,
        k_LKCD: Tensor,
        v_LKCD: Tensor,
        length_B: Tensor,
        longest: int,
    ) -> Tensor:
        """Write the new key and value into each slot, and return the attention to it, [B, N, D].

        No position beyond the new one is read, whatever it holds.

        Args:
            q_BND: Queries; in the dtype of all arrays but the lengths.
            k_BKD: Key of each new token.
            v_BKD: Value of each new token.
            k_LKCD: Keys of the slots; of the first B slots each gets one more.
            v_LKCD: Values of the slots.
            length_B: Tokens in each slot before the new one, int64.
            longest: The largest of them.
        """
