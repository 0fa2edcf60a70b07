"""Gradients as an optimizer uses them: its kernel may multiply them and write them nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.optim.adamw import AdamW

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.train.state import TrainState

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of a state's next step, divided and clipped."""

    def __init__(self, state: TrainState) -> None:
        """Keep them when the step begins to change the weights."""
        self._state = state
        self._kept: dict[str, Tensor] | None = None
        if isinstance(state.optimizer, AdamW):  # others are multiplied in place
            state.optimizer.before_next_change(self._keep)

    def of_step(self) -> dict[str, Tensor]:
        """Return them by the names of the parameters; to be called after the step."""
        return self._named(1.0) if self._kept is None else self._kept

    def _keep(self) -> None:
        self._kept = self._named(self._state.optimizer._factor)

    def _named(self, factor: float) -> dict[str, Tensor]:
        named = self._state.parallel.named_parameters()
        return {name: p.grad * factor for name, p in named if p.grad is not None}
