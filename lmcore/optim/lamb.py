"""LAMB: Adam's update of each parameter, scaled to that parameter's own size.

Source: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmcore.optim.optimizer import Optimizer, ParameterGroup, SumOverShards, raise_counts

__all__ = ["LAMB"]


class LAMB(Optimizer):
    """weight -= lr * |weight| / |u| * u, where u = Adam's direction + decay * weight.

    The ratio is 1 where either norm is 0, and for parameters without decay (biases, gains), as
    NVIDIA's and DeepSpeed's kernels have it.  Norms are those of whole parameters: where a process
    holds parts of them, `sum_over_shards` adds the squares.
    """

    sharding = "norms"

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        *,
        betas: tuple[float, float],
        epsilon: float,
        sum_over_shards: SumOverShards | None = None,
    ) -> None:
        """Allocate both moments.

        Args:
            groups: What to train.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment, after bias correction.
            sum_over_shards: Adds over the processes that hold parts; None: parameters are whole.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self.sum_over_shards = sum_over_shards
        self._first = self._moments("exp_avg")
        self._second = self._moments("exp_avg_sq")
        self._steps = self._scalars("step")

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        state = zip(self.groups, self._first, self._second, self._steps, strict=True)
        for group, first, second, steps in state:
            count = raise_counts(steps)
            gradients = group.gradients()
            torch._foreach_lerp_(first, gradients, 1 - self.beta1)
            torch._foreach_mul_(second, self.beta2)
            torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
            roots = torch._foreach_div(second, 1 - self.beta2**count)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, self.epsilon)
            updates = torch._foreach_div(first, 1 - self.beta1**count)
            torch._foreach_div_(updates, roots)
            if group.weight_decay:
                torch._foreach_add_(updates, group.parameters, alpha=group.weight_decay)
                torch._foreach_mul_(updates, self._ratios(group, list(updates)))
            torch._foreach_add_(group.parameters, updates, alpha=-lr)

    def _ratios(self, group: ParameterGroup, updates: list[Tensor]) -> list[Tensor]:
        """Return the norm of each whole parameter by that of its whole update."""
        tensors = [*group.parameters, *updates]
        squares = torch.stack([one.float().square().sum() for one in tensors])
        if self.sum_over_shards is not None:
            squares = self.sum_over_shards([*group.names, *group.names], squares)
        weight, update = squares.sqrt().chunk(2)
        ratios = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
        return [one.to(p.dtype) for one, p in zip(ratios, group.parameters, strict=True)]
