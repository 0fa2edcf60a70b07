"""AdamW over named parameters, its arithmetic done by the bound `adamw` op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["AdamW"]


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
            update: Bound `adamw` op.
            betas: Decay of the first and second moment.
            epsilon: Added to the root of the second moment.
        """
        super().__init__(groups)
        self.update = update
        self.beta1, self.beta2 = betas
        self.epsilon = epsilon
        self._first = self._moments("exp_avg")
        self._second = self._moments("exp_avg_sq")
        # On the device, as kernels want them.
        self._steps = self._create(
            "step", lambda parameter: torch.zeros((), dtype=torch.float32, device=parameter.device)
        )

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        state = zip(self.groups, self._first, self._second, self._steps, strict=True)
        for group, first, second, steps in state:
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
            )
