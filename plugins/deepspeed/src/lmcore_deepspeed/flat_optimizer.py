"""The optimizer that DeepSpeed calls: one of lmcore's optimizers on each flat row of weights.

DeepSpeed flattens weights into rows and gives every rank a part of each row; an elementwise
optimizer updates a part as it would the whole.  So both engines compute the same, and their
checkpoints hold the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.optim.create import create_optimizer
from lmcore.optim.optimizer import Optimizer, parameter_groups

if TYPE_CHECKING:
    from lmcore.config.section.optimizer import OptimizerSection

__all__ = ["Bind", "FlatUpdate", "StateKind", "state_kinds"]

Bind = Callable[[str], Callable[..., None]]
"""A function that returns the kernel of an op by name, for the device of the rows."""

_ROW = ".row"


@dataclass(frozen=True)
class StateKind:
    """A kind of state that an optimizer keeps for every parameter.

    Attributes:
        name: Name such as "exp_avg".
        dtype: Dtype of the state.
        shaped: True if the state has the parameter's shape; False if it is a scalar.
    """

    name: str
    dtype: torch.dtype
    shaped: bool


def state_kinds(settings: OptimizerSection, bind: Bind) -> list[StateKind]:
    """Return the kinds of state of the run's optimizer."""
    row = _Row(settings, torch.zeros(2, device="cpu"), bind)
    return [StateKind(name, tensor.dtype, tensor.ndim > 0) for name, tensor in row.state.items()]


class FlatUpdate(torch.optim.Optimizer):
    """The optimizer with torch's interface; its groups have the learning rate."""

    def __init__(
        self,
        settings: OptimizerSection,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        bind: Bind,
    ) -> None:
        """Group the parameters by weight decay.

        Args:
            settings: Settings of the run's optimizer, which must be elementwise.
            named_parameters: Parameters of the model, which DeepSpeed replaces by its rows.
            bind: See `Bind`.
        """
        self._settings, self._bind = settings, bind
        self._rows: dict[Tensor, _Row] = {}
        groups = parameter_groups(named_parameters, settings.weight_decay)
        super().__init__(
            [{"params": list(group.parameters), "decay": group.weight_decay} for group in groups],
            {"lr": settings.lr},
        )

    def create_state(self, rows: Iterable[tuple[Tensor, int]]) -> None:
        """Create the state of every row, filled with zeros, in `state`, where DeepSpeed reads it.

        Args:
            rows: Parts of this rank, each with the index of its group.
        """
        for row, group in rows:
            self._row(row, self.param_groups[group]["decay"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for row in group["params"]:
                if row.grad is not None:
                    self._row(row, group["decay"]).step(row.grad, group["lr"])

    def set_numbers(self, name: str, value: Tensor) -> None:
        """Set a scalar state, equal in all rows."""
        for row in self._rows.values():
            row.state[name].copy_(value)

    def number(self, name: str) -> Tensor:
        """Return a scalar state."""
        return next(iter(self._rows.values())).state[name]

    def _row(self, row: Tensor, decay: float) -> _Row:
        if row not in self._rows:
            settings = dataclasses.replace(self._settings, weight_decay=decay)
            self._rows[row] = _Row(settings, row, self._bind)
            self.state[row] = self._rows[row].state
        return self._rows[row]


class _Row:
    """One row and its optimizer, which sees the row as a matrix, since only matrices decay.

    Attributes:
        state: Live state by kind, of the row's shape or scalar.
    """

    def __init__(self, settings: OptimizerSection, row: Tensor, bind: Bind) -> None:
        self._matrix = nn.Parameter(row.detach().view(1, -1))
        self._optimizer: Optimizer = create_optimizer(
            settings, [(_ROW[1:], self._matrix)], bind=bind
        )
        self.state = {
            name.removesuffix(_ROW): tensor.view(-1) if tensor.ndim else tensor
            for name, tensor in self._optimizer.state_tensors().items()
        }

    def step(self, gradient: Tensor, lr: float) -> None:
        self._matrix.grad = gradient.view(1, -1)
        self._optimizer.step(lr)
        self._matrix.grad = None
