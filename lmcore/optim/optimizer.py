"""`Optimizer`: interface of every optimizer of a run for steps, checkpoints and sharding.

It does not derive from torch's base class, whose constructor imports torch's compiler (a second of
a start), and its state is a flat mapping of named tensors that exist from the beginning, as a
checkpoint needs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "Optimizer",
    "ParameterGroup",
    "Released",
    "SumOverShards",
    "parameter_groups",
    "raise_counts",
    "split_matrices",
]

SumOverShards = Callable[[Sequence[str], Tensor], Tensor]
"""A function that takes names of parameters and a number for each, computed from the local shard.

It returns the sums over all processes that hold shards of the same parameter.  All processes call
it equally often, also without parameters; their names may differ."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same weight decay."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    weight_decay: float

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter; all must have one."""
        found = [weight.grad for weight in self.parameters if weight.grad is not None]
        assert len(found) == len(self.parameters), "a parameter has no gradient"
        return found


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> tuple[ParameterGroup, ...]:
    """Return two groups: matrices with decay; biases, gains and other vectors without.

    Args:
        parameters: Names and parameters to train.
        weight_decay: Weight decay of the first group.
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
    """Return the groups of the layers' matrices, and the groups of all other parameters.

    A matrix multiplies hidden states; the rows of an embedding are looked up one by one, so that it
    is grouped with the vectors.
    """
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        is_matrix = parameter.ndim == 2 and "embedding" not in name
        (matrices if is_matrix else others).append((name, parameter))
    return parameter_groups(matrices, weight_decay), parameter_groups(others, weight_decay)


class Released(NamedTuple):
    """Names of tensors that an optimizer leaves as they are.

    Attributes:
        parameters: Names of parameters, whose data is other memory after the next step.
        state: Names in `Optimizer.state_tensors`.
    """

    parameters: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()


class Optimizer(ABC):
    """Interface of an optimizer.

    The state is created by the constructor, so that it can be loaded, and every step depends on
    weights, gradients and that state alone: a run that resumes is bitwise the unbroken one.  A
    state tensor of a parameter's shape is sharded as the parameter; a scalar is a count or a sum
    that all shards of the parameter share.  `lmcore.config.optimizers` has the optimizers that can
    update shards.
    """

    def __init__(self, groups: tuple[ParameterGroup, ...]) -> None:
        """Keep the parameters to train, from `parameter_groups`."""
        self.groups = groups
        self._state: dict[str, dict[str, Tensor]] = {}
        self._before_change: list[Callable[[], None]] = []

    def step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        self._begin_change()
        self._step(lr)

    @abstractmethod
    def _step(self, lr: float) -> None:
        """Do what `step` says."""

    @torch.no_grad()
    def scale_gradients(self, gradients: list[Tensor], factor: float) -> None:
        """Multiply the gradients of the next step.

        Args:
            gradients: All of them; whether they are changed in place is the optimizer's choice.
            factor: Finite number.
        """
        if factor != 1:
            torch._foreach_mul_(gradients, factor)

    def before_next_change(self, call: Callable[[], None]) -> None:
        """Call *call* once, before the parameters or the state change for the next time.

        A checkpoint that is copied while training computes ends its reads then.  Training changes
        parameters and state by the methods of this class alone: `step`, `update_hessian`,
        `eval_mode` and `train_mode`.
        """
        self._before_change.append(call)

    def _begin_change(self) -> None:
        """Call what waits for the next change.

        To be called by each `eval_mode` and `train_mode` that changes anything.
        """
        while self._before_change:
            self._before_change.pop()()

    def release_state(self) -> Released:
        """Leave tensors as they are from now on, and return their names.

        The next step puts other tensors in their place, with the new values.  So a checkpoint is
        written from them without a copy.  They are the caller's until it calls this again.  An
        optimizer that updates everything in place returns no names.
        """
        return Released()

    def prepare_release(self) -> None:  # noqa: B027 - optional
        """Allocate the memory that the step after the first `release_state` needs.

        Called before training, so that no step waits for the memory.
        """

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state by name, KIND.PARAMETER."""
        return {
            f"{kind}.{name}": tensor
            for kind, tensors in self._state.items()
            for name, tensor in tensors.items()
        }

    def eval_mode(self) -> None:  # noqa: B027 - optional
        """Set the parameters to the evaluation weights: to validate, sample, save and load.

        Most optimizers train the evaluation weights, and do nothing here.
        """

    def train_mode(self) -> None:  # noqa: B027 - optional
        """Set the parameters to the training weights again, bitwise as before.

        Weights and state that were loaded since `eval_mode` are used from here on.
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
        self._begin_change()
        self._update_hessian(factor)

    def _update_hessian(self, factor: float) -> None:
        """Do what `update_hessian` says."""
        raise NotImplementedError(f"{type(self).__name__} has no estimate of the Hessian")

    def _moments(self, kind: str) -> list[list[Tensor]]:
        """Create a kind of state of the parameters' shapes, zero; return it by group."""
        return self._create(
            kind, lambda weight: torch.zeros_like(weight, memory_format=torch.preserve_format)
        )

    def _scalars(self, kind: str, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
        """Create a kind of state of one number a parameter, zero, on the host."""
        return self._create(kind, lambda _: torch.zeros((), dtype=dtype, device="cpu"))

    def _create(self, kind: str, make: Callable[[nn.Parameter], Tensor]) -> list[list[Tensor]]:
        made = [[make(weight).detach() for weight in group.parameters] for group in self.groups]
        names = [name for group in self.groups for name in group.names]
        flat = [tensor for tensors in made for tensor in tensors]
        self._state[kind] = dict(zip(names, flat, strict=True))
        return made


def raise_counts(counts: Sequence[Tensor]) -> int:
    """Count one more step in each of *counts*, host scalars; return the number of this step."""
    for count in counts:
        count.add_(1)
    return int(counts[0])
