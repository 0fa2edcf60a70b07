"""`QuantizedWeight`: the weight of a projection in small integers, for generation; torch-free.

Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["QuantizedWeight"]


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
