"""AdamW over named parameters, its arithmetic done by the bound `adamw` op."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["AdamW"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(Optimizer):
    """AdamW with decoupled decay (Loshchilov and Hutter, 2019)."""

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
            groups: Parameters to train, from `parameter_groups`.
            update: Bound `adamw` op.  If it takes `new_moments`, two lists of tensors to which it
                writes the new moments, the state on the host can be released.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment.
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
        self._can_release = on_host and "new_moments" in inspect.signature(update).parameters
        self._released = False
        self._spare: tuple[list[list[Tensor]], list[list[Tensor]]] | None = None

    def release_state(self) -> set[str]:
        """Leave the present moments as they are: the next step writes the new ones elsewhere.

        The moments of the call before this one are that memory, so that it is allocated once.
        """
        self._released = self._can_release
        if not self._released:
            return set()
        return {f"{kind}.{name}" for kind in _MOMENTS for name in self._state[kind]}

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        old = self._first, self._second
        if self._released:
            self._first, self._second = self._spare or _empty_like(old)
        state = zip(self.groups, *old, self._first, self._second, self._steps, strict=True)
        for group, first, second, new_first, new_second, steps in state:
            self.update(
                list(group.parameters),
                group.gradients(),
                first,
                second,
                steps,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                weight_decay=group.weight_decay,
                **({"new_moments": (new_first, new_second)} if self._released else {}),
            )
        if self._released:
            self._released, self._spare = False, old
            for kind, lists in zip(_MOMENTS, (self._first, self._second), strict=True):
                moments = [moment for of_group in lists for moment in of_group]
                self._state[kind] = dict(zip(self._state[kind], moments, strict=True))


def _empty_like(
    moments: tuple[list[list[Tensor]], list[list[Tensor]]],
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    first, second = (
        [[torch.empty_like(one) for one in group] for group in kind] for kind in moments
    )
    return first, second
