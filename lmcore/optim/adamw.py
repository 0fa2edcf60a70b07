"""AdamW over named parameters, its arithmetic done by the bound `adamw` op."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmcore.contract.weight_copies import copies_of, forget_copies, keep_copies, use_copies
from lmcore.optim.optimizer import Optimizer, ParameterGroup, Released

__all__ = ["AdamW"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = list[Tensor]


class AdamW(Optimizer):
    """AdamW with decoupled decay (Loshchilov and Hutter, 2019)."""

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        update: Callable[..., None],
        *,
        betas: tuple[float, float],
        epsilon: float,
        owns_weights: bool = False,
        copies: torch.dtype | None = None,
    ) -> None:
        """Allocate both moments.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            update: Bound `adamw` op.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment.
            owns_weights: True if nothing else keeps the memory of a parameter, so that it can be
                exchanged.
            copies: Dtype of products, if it is not the dtype of the weights: their copies for
                products are written with them where the kernel can, and *owns_weights*.
        """
        super().__init__(groups)
        self.update = update
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self._first = self._moments(_MOMENTS[0])
        self._second = self._moments(_MOMENTS[1])
        # On the device, as kernels want them.
        self._steps = self._create(
            "step", lambda parameter: torch.zeros((), dtype=torch.float32, device=parameter.device)
        )
        on_host = all(
            weight.device.type == "cpu" for group in groups for weight in group.parameters
        )
        takes = inspect.signature(update).parameters
        self._can_release = owns_weights and on_host and "results" in takes
        self._takes_factor = "gradient_factor" in takes
        self._factor = 1.0
        self._copies = copies is not None and owns_weights and "copies" in takes
        if self._copies:
            assert copies is not None
            matrices = [w for group in groups for w in group.parameters if w.ndim >= 2]
            keep_copies(matrices, copies)
        self._released = False
        self._spare: list[tuple[Tensors, Tensors, Tensors]] = []

    def release_state(self) -> Released:
        """Leave parameters and moments as they are: the next step writes its results elsewhere.

        Their memory is used again after the next call, so that it is allocated once.
        """
        self._released = self._can_release
        if not self._released:
            return Released()
        names = [name for group in self.groups for name in group.names]
        return Released(
            frozenset(names), frozenset(f"{kind}.{name}" for kind in _MOMENTS for name in names)
        )

    def prepare_release(self) -> None:
        """Allocate the results of a step, and have the system find the memory now.

        Of memory that is allocated and never written the system has nothing but the addresses.
        """
        if self._can_release and not self._spare:
            self._spare = [_zeros_like(self._tensors(at)) for at in range(len(self.groups))]

    def train_mode(self) -> None:
        """Use no copy of a weight that may have been loaded."""
        if self._copies:
            for group in self.groups:
                forget_copies(group.parameters)

    def scale_gradients(self, gradients: list[Tensor], factor: float) -> None:
        """Multiply the gradients of the next step, by its kernel if that can."""
        if self._takes_factor:
            self._factor = factor
        else:
            super().scale_gradients(gradients, factor)

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        if self._released:
            self.prepare_release()
        extra: dict[str, Any] = {}
        if self._factor != 1:
            extra["gradient_factor"], self._factor = self._factor, 1.0
        for at, group in enumerate(self.groups):
            old = self._tensors(at)
            if self._copies:
                extra["copies"] = copies_of(group.parameters)
            if self._released:
                extra["results"] = self._spare[at]
            self.update(
                list(group.parameters),
                group.gradients(),
                self._first[at],
                self._second[at],
                self._steps[at],
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                weight_decay=group.weight_decay,
                **extra,
            )
            if self._released:
                self._exchange(at, self._spare[at])
                self._spare[at] = old
            if self._copies:
                use_copies(group.parameters)
        self._released = False

    def _tensors(self, at: int) -> tuple[Tensors, Tensors, Tensors]:
        """Return weights and moments of a group."""
        weights = [weight.data for weight in self.groups[at].parameters]
        return weights, self._first[at], self._second[at]

    def _exchange(self, at: int, results: tuple[Tensors, Tensors, Tensors]) -> None:
        """Put *results* in the place of a group's weights and moments."""
        group = self.groups[at]
        for weight, data in zip(group.parameters, results[0], strict=True):
            weight.data = data
        self._first[at], self._second[at] = results[1:]
        for kind, moments in zip(_MOMENTS, results[1:], strict=True):
            self._state[kind].update(zip(group.names, moments, strict=True))


def _zeros_like(old: tuple[Tensors, Tensors, Tensors]) -> tuple[Tensors, Tensors, Tensors]:
    # Not `torch.zeros_like`, which on a host takes memory that the system has not found yet.
    weights, first, second = ([torch.empty_like(one).zero_() for one in part] for part in old)
    return weights, first, second
