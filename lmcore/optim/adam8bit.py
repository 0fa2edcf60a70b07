"""AdamW with moments of 8 bits, a quarter of their memory.

torchao's class is not used: its step is compiled for every parameter shape, seconds each, or takes
twice the time of this one; and its import loads the compiler.  The tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmcore.optim.optimizer import Optimizer, ParameterGroup
from lmcore.optim.quantized_moment import Grid, QuantizedMoment

__all__ = ["AdamW8bit"]

_LEAST_NUMBERS = 4096
"""Number of elements below which a parameter keeps float32, as few would share a scale."""


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
