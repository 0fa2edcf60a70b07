"""AdamW over named parameters, its arithmetic done by the bound `adamw` op.

A class of our own rather than torch's: constructing one of torch's optimizers imports its
compiler (1.2 s of a start), and the state here is a flat mapping of named tensors, as a
checkpoint wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["AdamW", "ParameterGroup", "parameter_groups"]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    weight_decay: float


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> tuple[ParameterGroup, ...]:
    """Return two groups: matrices with decay; biases, gains and other vectors without.

    Args:
        parameters: Names and parameters, those to be trained.
        weight_decay: Decay of the first group.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        (decayed if parameter.ndim >= 2 else plain).append((name, parameter))
    return tuple(
        ParameterGroup(tuple(n for n, _ in members), tuple(p for _, p in members), decay)
        for members, decay in ((decayed, weight_decay), (plain, 0.0))
        if members
    )


class AdamW:
    """AdamW with decoupled decay; the state is created at once, so that it can be loaded."""

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        update: Callable[..., None],
        *,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """Allocate both moments.

        Args:
            groups: What to train, from `parameter_groups`.
            update: The bound `adamw` op.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment.
        """
        self.groups = groups
        self.update = update
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self._moments = [
            (
                [torch.zeros_like(p, memory_format=torch.preserve_format) for p in g.parameters],
                [torch.zeros_like(p, memory_format=torch.preserve_format) for p in g.parameters],
                [torch.zeros((), dtype=torch.float32, device=p.device) for p in g.parameters],
            )
            for g in groups
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for group, (first, second, steps) in zip(self.groups, self._moments, strict=True):
            grads = [parameter.grad for parameter in group.parameters]
            self.update(
                list(group.parameters),
                grads,
                first,
                second,
                steps,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                weight_decay=group.weight_decay,
            )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the gradients there are, in the groups' order."""
        return [
            parameter.grad
            for group in self.groups
            for parameter in group.parameters
            if parameter.grad is not None
        ]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state by name: exp_avg.NAME, exp_avg_sq.NAME, step.NAME."""
        found: dict[str, Tensor] = {}
        for group, moments in zip(self.groups, self._moments, strict=True):
            for kind, tensors in zip(("exp_avg", "exp_avg_sq", "step"), moments, strict=True):
                found.update(
                    {f"{kind}.{name}": t for name, t in zip(group.names, tensors, strict=True)}
                )
        return found
