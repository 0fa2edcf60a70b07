"""Stochastic gradient descent with momentum, as in torch and Megatron."""

from __future__ import annotations

import torch

from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["SGD"]


class SGD(Optimizer):
    """b = momentum * b + (gradient + decay * weight); weight -= lr * b.

    The decay is part of the gradient, not decoupled from it as in the other optimizers here.
    """

    def __init__(self, groups: tuple[ParameterGroup, ...], *, momentum: float) -> None:
        """Allocate the momentum buffers, unless *momentum* is 0."""
        super().__init__(groups)
        self.momentum = momentum
        self._buffers = self._moments("momentum_buffer") if momentum else None

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for index, group in enumerate(self.groups):
            changes = group.gradients()
            if group.weight_decay:
                changes = list(
                    torch._foreach_add(changes, group.parameters, alpha=group.weight_decay)
                )
            if self._buffers is not None:
                buffers = self._buffers[index]
                torch._foreach_mul_(buffers, self.momentum)
                torch._foreach_add_(buffers, changes)
                changes = buffers
            torch._foreach_add_(group.parameters, changes, alpha=-lr)
