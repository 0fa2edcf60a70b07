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
        """Allocate momentum and curvature.

        Args:
            groups: What to train.
            betas: Decay of the momentum and of the curvature.
            rho: Factor of the curvature; the smaller, the fewer entries are left unclipped.
            interval: Steps from one estimate to the next.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.rho, self.interval = rho, interval
        self._first = self._moments("exp_avg")
        self._curvature = self._moments("hessian")

    @property
    def curvature_interval(self) -> int:
        """Steps from one call of `add_curvature` to the next, the first step's included."""
        return self.interval

    @torch.no_grad()
    def add_curvature(self, factor: float) -> None:
        """Estimate the curvature from the gradients, those against sampled labels."""
        for group, curvature in zip(self.groups, self._curvature, strict=True):
            gradients = group.gradients()
            share = (1 - self.beta2) * factor
            torch._foreach_mul_(curvature, self.beta2)
            torch._foreach_addcmul_(curvature, gradients, gradients, value=share)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for group, first, curvature in zip(self.groups, self._first, self._curvature, strict=True):
            torch._foreach_lerp_(first, group.gradients(), 1 - self.beta1)
            if group.weight_decay:
                torch._foreach_mul_(group.parameters, 1 - lr * group.weight_decay)
            scale = torch._foreach_mul(curvature, self.rho)
            torch._foreach_clamp_min_(scale, _LEAST)
            moves = torch._foreach_div(first, scale)
            torch._foreach_clamp_min_(moves, -1.0)
            torch._foreach_clamp_max_(moves, 1.0)
            torch._foreach_add_(group.parameters, moves, alpha=-lr)
