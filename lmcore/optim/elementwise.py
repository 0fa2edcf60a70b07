"""Optimizers that update each weight from its own gradient and state.

SGD with momentum, as in torch and Megatron; ADOPT; Sophia-G; schedule-free AdamW.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmcore.optim.optimizer import Optimizer, ParameterGroup, raise_counts

__all__ = ["ADOPT", "SGD", "ScheduleFreeAdamW", "Sophia"]


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


class ADOPT(Optimizer):
    """m = lerp(m, clip(g / max(sqrt(v), eps), t^0.25)); weight -= lr * m; v = lerp(v, g^2).

    Adam with the second moment of the previous step, which converges for any beta2.  The first step
    changes no weight: it initializes v.  Weight decay is decoupled.

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal
    Rate" (2024), algorithm 2 with the clipping of its authors' implementation.
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


_LEAST = 1e-15


class Sophia(Optimizer):
    """weight -= lr * clip(m / max(rho * h, 1e-15), 1), after decoupled decay.

    Every `interval` steps, from the first on, h takes in num_tokens * g^2, where g is the gradient
    of the mean loss against labels that are sampled from the model's own predictions.

    Source: Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
    Pre-training" (2024), algorithms 2 (the Gauss-Newton-Bartlett estimate) and 3.
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


class ScheduleFreeAdamW(Optimizer):
    """AdamW without a decay of the learning rate; the evaluation weights are an average.

    Three sequences: z takes the steps; x is the average of z; y is between them, for gradients.

    z -= lr * (g / (sqrt(v) + eps) + decay * y), x = lerp(x, z, c), y = lerp(z, x, beta1), where c
    is the step's share of the sum of squared rates.  Parameters are y in training and x after
    `eval_mode`.  The authors' package keeps y alone and computes x from it, so that a validation or
    a save changes the last bits of a run; here x is kept, too.

    Source: Defazio et al., "The Road Less Scheduled" (2024), with the weighting of the average by
    the learning rate of its authors' package.
    """

    def __init__(
        self, groups: tuple[ParameterGroup, ...], *, betas: tuple[float, float], epsilon: float
    ) -> None:
        """Allocate z, x and the second moment.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            betas: Share of x in y, and decay of the second moment.
            epsilon: Added to the root of the second moment, after bias correction.
        """
        super().__init__(groups)
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self.training = True
        self._second = self._moments("exp_avg_sq")
        self._z = self._moments("z")
        self._steps = self._scalars("step")
        # Doubles: sums of small numbers over a whole run.
        self._sums = self._scalars("weight_sum", torch.float64)
        self._highest = self._scalars("lr_max", torch.float64)
        self._x = [[torch.zeros_like(weight).detach() for weight in g.parameters] for g in groups]

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        assert self.training, "these are the evaluation weights: call `train_mode` first"
        for index, group in enumerate(self.groups):
            second, z, x = self._second[index], self._z[index], self._x[index]
            count = raise_counts(self._steps[index])
            if count == 1:
                torch._foreach_copy_(z, group.parameters)
                torch._foreach_copy_(x, group.parameters)
            share = self._share(index, lr)
            gradients = group.gradients()
            torch._foreach_mul_(second, self.beta2)
            torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
            roots = torch._foreach_div(second, 1 - self.beta2**count)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, self.epsilon)
            moves = torch._foreach_div(gradients, roots)
            if group.weight_decay:
                torch._foreach_add_(moves, group.parameters, alpha=group.weight_decay)
            torch._foreach_add_(z, moves, alpha=-lr)
            torch._foreach_lerp_(x, z, share)
            self._to_y(index)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state by name, without x: the parameters are x after `eval_mode`.

        The state does not fit parameters that are y.
        """
        assert not self.training, "these are the training weights: call `eval_mode` first"
        return super().state_tensors()

    @torch.no_grad()
    def eval_mode(self) -> None:
        """Set the parameters to x."""
        self._begin_change()
        if self.training:
            for group, x, steps in zip(self.groups, self._x, self._steps, strict=True):
                if int(steps[0]):
                    torch._foreach_copy_(group.parameters, x)
        self.training = False

    @torch.no_grad()
    def train_mode(self) -> None:
        """Set the parameters to y again; their present values, which may be loaded, become x."""
        self._begin_change()
        if not self.training:
            for index, (group, steps) in enumerate(zip(self.groups, self._steps, strict=True)):
                if int(steps[0]):
                    torch._foreach_copy_(self._x[index], group.parameters)
                    self._to_y(index)
        self.training = True

    def _to_y(self, index: int) -> None:
        """Set the parameters to y, which x and z determine bitwise."""
        parameters = self.groups[index].parameters
        torch._foreach_copy_(parameters, self._z[index])
        torch._foreach_lerp_(parameters, self._x[index], self.beta1)

    def _share(self, index: int, lr: float) -> float:
        """Return the share of the new z in the average, and count it."""
        highest = max(lr, float(self._highest[index][0]))
        total = float(self._sums[index][0]) + highest**2
        for kept, value in ((self._highest[index], highest), (self._sums[index], total)):
            for number in kept:
                number.fill_(value)
        return highest**2 / total if total else 0.0
