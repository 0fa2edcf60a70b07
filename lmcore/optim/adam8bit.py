"""AdamW with moments of 8 bits, a quarter of their memory.

A moment is stored in blocks of 256 numbers, each with a scale, on a dynamic grid: fine near zero
and coarse near one, since the numbers of a moment differ by orders of magnitude.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022).

torchao's class is not used: its step is compiled for every parameter shape, seconds each, or takes
twice the time of this one; and its import loads the compiler.  The tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["BLOCK", "AdamW8bit", "Grid", "QuantizedMoment", "dynamic_grid"]

_LEAST_NUMBERS = 4096
"""Number of elements below which a parameter keeps float32, as few would share a scale."""
BLOCK = 256
"""Number of elements that share a scale."""
_DECADES = 7
_LEAST_SCALE = 1e-12


@dataclass(frozen=True)
class _Entry:
    parameter: nn.Parameter
    decay: float
    step: Tensor
    moments: tuple[QuantizedMoment | Tensor, QuantizedMoment | Tensor]


class AdamW8bit(Optimizer):
    """AdamW by the bound `adamw` op, one parameter after another, moments quantized in between."""

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        update: Callable[..., None],
        *,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """Allocate codes and scales; for the arguments see `AdamW`."""
        super().__init__(groups)
        self.update = update
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self._grids: dict[tuple[torch.device, bool], Grid] = {}
        self._entries = [
            self._entry(name, parameter, group.weight_decay)
            for group in groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        ]

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for entry in self._entries:
            read = [m.read() if isinstance(m, QuantizedMoment) else m for m in entry.moments]
            assert entry.parameter.grad is not None, "a parameter has no gradient"
            self.update(
                [entry.parameter],
                [entry.parameter.grad],
                [read[0]],
                [read[1]],
                [entry.step],
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                weight_decay=entry.decay,
            )
            for kept, moment in zip(entry.moments, read, strict=True):
                if isinstance(kept, QuantizedMoment):
                    kept.write(moment)

    def _entry(self, name: str, parameter: nn.Parameter, decay: float) -> _Entry:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments: list[QuantizedMoment | Tensor] = []
        for kind, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if parameter.numel() < _LEAST_NUMBERS:
                plain = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
                moments.append(plain)
                self._keep(kind, name, plain)
                continue
            quantized = QuantizedMoment(
                parameter.shape, self._grid(parameter.device, signed=signed)
            )
            moments.append(quantized)
            self._keep(kind, name, quantized.codes)
            self._keep(f"{kind}_scale", name, quantized.scales)
        self._keep("step", name, step)
        return _Entry(parameter, decay, step, (moments[0], moments[1]))

    def _grid(self, device: torch.device, *, signed: bool) -> Grid:
        """Return the grid of a device, created once for all parameters."""
        if (device, signed) not in self._grids:
            self._grids[device, signed] = Grid(signed=signed, device=device)
        return self._grids[device, signed]

    def _keep(self, kind: str, name: str, tensor: Tensor) -> None:
        self._state.setdefault(kind, {})[name] = tensor


def dynamic_grid(*, signed: bool) -> Tensor:
    """Return the values of the 256 codes, between -1 (or 0) and 1, in float32, ascending.

    Each power of ten from 1e-7 up has twice the values of the one below, at the middles of equal
    intervals; 0 and 1 are added.

    Args:
        signed: True if half of the values are negative.
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


class Grid:
    """Values of the codes on a device, shared by all moments of a kind.

    The upper 16 bits of a float32 determine the two nearest values: a table has the lower one, and
    a comparison with the middle between them decides.  A binary search for each number takes
    fifteen times as long on a CPU.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        """Create the tables.

        Args:
            signed: True if numbers may be negative.
            device: Device of the tables.
        """
        grid = dynamic_grid(signed=signed)
        self.values = grid.to(device)
        self.zero = int(torch.searchsorted(grid, 0.0))
        middles = (grid[:-1] + grid[1:]) / 2
        patterns = torch.arange(2**16, dtype=torch.int64)
        patterns = torch.where(patterns >= 2**15, patterns - 2**16, patterns) << 16
        ends = torch.stack([patterns, patterns | 0xFFFF]).to(torch.int32).view(torch.float32)
        least = torch.where(ends[0].isnan(), ends[0], ends.amin(dim=0))
        self._lower = torch.searchsorted(middles, least, right=True).int().to(device)
        self._middles = torch.cat([middles, torch.tensor([torch.inf])]).to(device)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Return the codes of *numbers*, int32; halfway between two values the upper one."""
        flat = numbers.flatten()
        lower = self._lower.index_select(0, (flat.view(torch.int32) >> 16) & 0xFFFF)
        codes = lower + (flat >= self._middles.index_select(0, lower))
        return codes.view(numbers.shape)


class QuantizedMoment:
    """Codes and scales of a parameter's moment."""

    def __init__(self, shape: torch.Size, grid: Grid) -> None:
        """Create a moment of zeros on the grid's device.

        Args:
            shape: Shape of the parameter.
            grid: Values of the codes.
        """
        self.shape, self.grid = shape, grid
        blocks, device = -(-shape.numel() // BLOCK), grid.values.device
        self.codes = torch.full((blocks, BLOCK), grid.zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=device)

    def read(self) -> Tensor:
        """Return the moment in float32, of the parameter's shape."""
        values = self.grid.values.index_select(0, self.codes.flatten().int()).view(-1, BLOCK)
        values.mul_(self.scales.unsqueeze(1))
        return values.flatten()[: self.shape.numel()].view(self.shape)

    def write(self, moment: Tensor) -> None:
        """Quantize *moment*: each block by its largest magnitude and the nearest grid values."""
        flat = moment.float().flatten()
        padding = self.codes.numel() - flat.numel()
        blocks = functional.pad(flat, (0, padding)).view(-1, BLOCK)
        self.scales.copy_(blocks.abs().amax(dim=1).clamp_min_(_LEAST_SCALE))
        self.codes.copy_(self.grid.nearest(blocks / self.scales.unsqueeze(1)))
