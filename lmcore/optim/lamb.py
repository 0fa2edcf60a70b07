"""LAMB: Adam's update of each parameter, scaled to the norm of the parameter.

Source: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmcore.optim.optimizer import Optimizer, ParameterGroup, SumOverShards, raise_counts

__all__ = ["LAMB"]


class LAMB(Optimizer):
    """weight -= lr * |weight| / |u| * u, where u = Adam's direction + decay * weight.

    The ratio is 1 if either norm is 0, and for parameters without decay (biases, gains), as in the
    usual fused kernels.  Norms are of whole parameters: if a process holds shards,
    `sum_over_shards` adds the squares.
    """

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
            groups: Parameters to train, from `parameter_groups`.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment, after bias correction.
            sum_over_shards: Sum over the processes that hold shards; None: parameters are whole.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self.sum_over_shards = sum_over_shards
        self._first = self._moments("exp_avg")
        self._second = self._moments("exp_avg_sq")
        self._steps = self._scalars("step")

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        updates = [self._updates(index) for index in range(len(self.groups))]
        scaled = [
            (name, weight, update)
            for group, changes in zip(self.groups, updates, strict=True)
            if group.weight_decay
            for name, weight, update in zip(group.names, group.parameters, changes, strict=True)
        ]
        names = [name for name, _, _ in scaled]
        weights = self._norms(names, [weight for _, weight, _ in scaled])
        changes = self._norms(names, [update for _, _, update in scaled])
        ratios = torch.where((weights > 0) & (changes > 0), weights / changes, 1.0)
        for (_, _, update), ratio in zip(scaled, ratios, strict=True):
            update.mul_(ratio)
        for group, changes_of in zip(self.groups, updates, strict=True):
            torch._foreach_add_(group.parameters, changes_of, alpha=-lr)

    def _updates(self, index: int) -> list[Tensor]:
        """Return Adam's updates of a group, with the decay."""
        group, first, second = self.groups[index], self._first[index], self._second[index]
        count = raise_counts(self._steps[index])
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
        return list(updates)

    def _norms(self, names: list[str], parts: list[Tensor]) -> Tensor:
        """Return the norms of the whole tensors, from the *parts* of this process."""
        squares = torch.stack([part.float().square().sum() for part in parts] or [torch.zeros(())])
        squares = squares[: len(parts)]
        if self.sum_over_shards is not None:
            squares = self.sum_over_shards(names, squares)
        return squares.sqrt()
