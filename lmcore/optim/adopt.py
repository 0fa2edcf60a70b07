"""ADOPT: Adam with the second moment of the previous step, which converges for any beta2.

Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate"
(2024), algorithm 2 with the clipping of its authors' implementation.
"""

from __future__ import annotations

import torch

from lmcore.optim.optimizer import Optimizer, ParameterGroup, raise_counts

__all__ = ["ADOPT"]


class ADOPT(Optimizer):
    """m = lerp(m, clip(g / max(sqrt(v), eps), t^0.25)); weight -= lr * m; v = lerp(v, g^2).

    The first step changes no weight: it initializes v.  Weight decay is decoupled.
    """

    def __init__(
        self, groups: tuple[ParameterGroup, ...], *, betas: tuple[float, float], epsilon: float
    ) -> None:
        """Allocate both moments.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            betas: Decay of the first and second moment.
            epsilon: Smallest value of the root of the second moment.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self._first = self._moments("exp_avg")
        self._second = self._moments("exp_avg_sq")
        self._steps = self._scalars("step")

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        state = zip(self.groups, self._first, self._second, self._steps, strict=True)
        for group, first, second, steps in state:
            moves = raise_counts(steps) - 1
            gradients = group.gradients()
            if moves == 0:
                torch._foreach_addcmul_(second, gradients, gradients)
                continue
            if group.weight_decay:
                torch._foreach_mul_(group.parameters, 1 - lr * group.weight_decay)
            roots = torch._foreach_sqrt(second)
            torch._foreach_clamp_min_(roots, self.epsilon)
            normed = torch._foreach_div(gradients, roots)
            limit = moves**0.25
            torch._foreach_clamp_min_(normed, -limit)
            torch._foreach_clamp_max_(normed, limit)
            torch._foreach_lerp_(first, normed, 1 - self.beta1)
            torch._foreach_add_(group.parameters, first, alpha=-lr)
            torch._foreach_mul_(second, self.beta2)
            torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
