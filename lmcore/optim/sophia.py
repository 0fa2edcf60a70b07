"""Sophia-G: momentum divided by an estimate of the Hessian's diagonal, each entry clipped.

Source: Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
Pre-training" (2024), algorithms 2 (the Gauss-Newton-Bartlett estimate) and 3.
"""

from __future__ import annotations

import torch

from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["Sophia"]

_LEAST = 1e-15


class Sophia(Optimizer):
    """weight -= lr * clip(m / max(rho * h, 1e-15), 1), after decoupled decay.

    Every `interval` steps, from the first on, h takes in num_tokens * g^2, where g is the gradient
    of the mean loss against labels that are sampled from the model's own predictions.
    """

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        *,
        betas: tuple[float, float],
        rho: float,
        interval: int,
    ) -> None:
        """Allocate momentum and Hessian diagonal.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            betas: Decay of the momentum and of the Hessian diagonal.
            rho: Factor of the Hessian diagonal; the smaller, the fewer entries are left unclipped.
            interval: Steps from one estimate to the next.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.rho, self.interval = rho, interval
        self._first = self._moments("exp_avg")
        self._hessian = self._moments("hessian")

    @property
    def hessian_interval(self) -> int:
        """Number of steps between calls of `update_hessian`."""
        return self.interval

    @torch.no_grad()
    def _update_hessian(self, factor: float) -> None:
        """Update the estimate from gradients of the loss against sampled labels."""
        for group, hessian in zip(self.groups, self._hessian, strict=True):
            gradients = group.gradients()
            share = (1 - self.beta2) * factor
            torch._foreach_mul_(hessian, self.beta2)
            torch._foreach_addcmul_(hessian, gradients, gradients, value=share)

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for group, first, hessian in zip(self.groups, self._first, self._hessian, strict=True):
            torch._foreach_lerp_(first, group.gradients(), 1 - self.beta1)
            if group.weight_decay:
                torch._foreach_mul_(group.parameters, 1 - lr * group.weight_decay)
            scale = torch._foreach_mul(hessian, self.rho)
            torch._foreach_clamp_min_(scale, _LEAST)
            moves = torch._foreach_div(first, scale)
            torch._foreach_clamp_min_(moves, -1.0)
            torch._foreach_clamp_max_(moves, 1.0)
            torch._foreach_add_(group.parameters, moves, alpha=-lr)
