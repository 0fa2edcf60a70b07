"""A moment of Adam in 8 bits a number: blocks of 256, each with a scale, on a dynamic grid.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022).  The grid is fine
near zero and coarse near one, since a moment's numbers lie orders of magnitude apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BLOCK", "QuantizedMoment", "dynamic_grid"]

BLOCK = 256
"""Numbers that share a scale."""

_DECADES = 7
_LEAST_SCALE = 1e-12


def dynamic_grid(*, signed: bool) -> Tensor:
    """Return the 256 values between -1 (or 0) and 1 that a code stands for, in float32, ascending.

    Each power of ten from 1e-7 up has twice the values of the one below, at the middles of equal
    intervals; 0 and 1 are added.

    Args:
        signed: Whether half of the values are negative.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, count + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


class QuantizedMoment:
    """The codes and scales of one parameter's moment."""

    def __init__(self, like: Tensor, *, signed: bool) -> None:
        """Begin at zero.

        Args:
            like: The parameter.
            signed: Whether numbers may be negative.
        """
        self.shape = like.shape
        blocks = -(-like.numel() // BLOCK)
        grid = dynamic_grid(signed=signed)
        zero = int(torch.searchsorted(grid, 0.0))
        self.codes = torch.full((blocks, BLOCK), zero, dtype=torch.uint8, device=like.device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=like.device)
        self._grid = grid.to(like.device)
        self._middles = ((grid[:-1] + grid[1:]) / 2).to(like.device)

    def read(self) -> Tensor:
        """Return the moment in float32, of the parameter's shape."""
        values = self._grid[self.codes.int()] * self.scales.unsqueeze(1)
        return values.flatten()[: self.shape.numel()].view(self.shape)

    def write(self, moment: Tensor) -> None:
        """Keep *moment*: each block by its largest magnitude and the nearest values of the grid."""
        flat = moment.float().flatten()
        padding = self.codes.numel() - flat.numel()
        blocks = functional.pad(flat, (0, padding)).view(-1, BLOCK)
        self.scales.copy_(blocks.abs().amax(dim=1).clamp_min_(_LEAST_SCALE))
        scaled = blocks / self.scales.unsqueeze(1)
        self.codes.copy_(torch.bucketize(scaled, self._middles, right=True, out_int32=True))
