"""`Optimizer`: what every optimizer of a run offers to step, checkpoint and sharding.

Classes of our own rather than torch's base class: constructing one of torch's imports its compiler
(a second of a start), and the state here is a flat mapping of named tensors that exist from the
beginning, as a checkpoint wants it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = [
    "Optimizer",
    "ParameterGroup",
    "SumOverShards",
    "parameter_groups",
    "raise_counts",
    "split_matrices",
]

SumOverShards = Callable[[Sequence[str], Tensor], Tensor]
"""Given the names of parameters and one number for each, computed from the part that is here,
returns the sums over all processes that hold other parts of the same parameter.  All processes call
it equally often, those that hold nothing too; their names may differ."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    weight_decay: float

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter; all must have one."""
        found = [one.grad for one in self.parameters if one.grad is not None]
        assert len(found) == len(self.parameters), "a parameter has no gradient"
        return found


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


def split_matrices(
    parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> tuple[tuple[ParameterGroup, ...], tuple[ParameterGroup, ...]]:
    """Return the groups of the layers' matrices, and those of all else.

    A matrix multiplies hidden states; an embedding, of any part of the model, looks up its rows
    one by one and belongs with the vectors.
    """
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        is_matrix = parameter.ndim == 2 and "embedding" not in name
        (matrices if is_matrix else others).append((name, parameter))
    return parameter_groups(matrices, weight_decay), parameter_groups(others, weight_decay)


class Optimizer(ABC):
    """The interface; a subclass says in its own words what it computes.

    Its state is created by the constructor, so that it can be loaded, and every step depends on
    weights, gradients and that state alone: a run goes on bit for bit.  A state tensor of a
    parameter's shape is sharded as the parameter is; one without dimensions is a count or a sum
    that all parts of the parameter share.  Which optimizers bear that `lmcore.config.optimizers`
    says.
    """

    def __init__(self, groups: tuple[ParameterGroup, ...]) -> None:
        """Keep what to train, from `parameter_groups`."""
        self.groups = groups
        self._state: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state by name, KIND.PARAMETER."""
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self._state.items()
            for name, tensor in tensors.items()
        }

    def eval_mode(self) -> None:  # noqa: B027 - nothing to do is a way to do it
        """Let the parameters hold the weights to use: to validate, to sample, to save and load.

        Most optimizers train the weights that they give, and do nothing here.
        """

    def train_mode(self) -> None:  # noqa: B027 - the same
        """Let the parameters hold the weights to train again, to the bit those of before.

        Weights and state that were loaded since `eval_mode` are taken over.
        """

    @property
    def hessian_interval(self) -> int | None:
        """Number of steps between calls of `update_hessian`; None if the optimizer has no Hessian.

        The first call comes before the first step.
        """
        return None

    def update_hessian(self, factor: float) -> None:
        """Update the Hessian estimate from gradients of the mean loss against sampled labels.

        Args:
            factor: Factor of the squared gradients: number of tokens in the mean over all ranks,
                divided by the square of the loss scale.
        """
        raise NotImplementedError(f"{type(self).__name__} has no estimate of the Hessian")

    def _moments(self, kind: str) -> list[list[Tensor]]:
        """Create a kind of state of the parameters' shapes, zeros; return it by group."""
        return self._create(
            kind, lambda one: torch.zeros_like(one, memory_format=torch.preserve_format)
        )

    def _scalars(self, kind: str, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
        """Create a kind of state of one number a parameter, zero; on the host, to be read there."""
        return self._create(kind, lambda one: torch.zeros((), dtype=dtype, device="cpu"))

    def _create(self, kind: str, make: Callable[[nn.Parameter], Tensor]) -> list[list[Tensor]]:
        made = [[make(one).detach() for one in group.parameters] for group in self.groups]
        names = [name for group in self.groups for name in group.names]
        flat = [tensor for tensors in made for tensor in tensors]
        self._state[kind] = dict(zip(names, flat, strict=True))
        return made


def raise_counts(counts: Sequence[Tensor]) -> int:
    """Count one more step in each of *counts*, host scalars; return the number of this step."""
    for count in counts:
        count.add_(1)
    return int(counts[0])
