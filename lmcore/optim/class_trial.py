"""Trial of a `torch.optim.Optimizer` class on two small parameters, before training starts.

The trial finds a class that cannot train here, and numbers outside of `state` that belong to the
state.  Then it interrupts training several times, each time with a fresh instance and the state
that a checkpoint would have, and warns if the weights are not bitwise the uninterrupted ones.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.base.errors import ConfigError
from lmcore.optim.adapter import (
    CONSTANTS,
    NumberPath,
    StateFacts,
    TorchOptimizer,
    fixed_random_numbers,
    flatten,
    numbers,
    outside_state,
    trial_steps,
)
from lmcore.optim.imported_class import ImportedClass, error_text
from lmcore.optim.optimizer import ParameterGroup

logger = logging.getLogger(__name__)

_SHAPES = ((4, 6), (6,))
_STEPS = 23
"""Number of steps; a prime, so that counters outside of the instance are out of phase later."""
_INTERRUPTIONS = (3, 8, 17)
_ROWS, _ROWS_STEPS = slice(0, 2), 2


def create_torch_optimizer(
    groups: tuple[ParameterGroup, ...],
    path: str,
    arguments: Sequence[str] = (),
    *,
    elementwise: bool = False,
    warns: bool = True,
) -> TorchOptimizer:
    """Return an optimizer of the class "module:Class" with arguments "key=value", after a trial.

    A class that does not resume bitwise in the trial is accepted with a warning.

    With *elementwise* the user says that the class updates each weight from its own gradient and
    state alone, so that parameters may be sharded.  One rank of a run *warns*.

    Raises:
        ConfigError: There is no such class, it refuses its arguments, or it cannot train here.
    """
    imported = ImportedClass.load(path, arguments)
    if not groups:
        return TorchOptimizer(groups, imported, StateFacts())
    weights, facts = _uninterrupted(imported, groups, elementwise=elementwise)
    if elementwise:
        _check_rows(imported, groups, weights[_ROWS_STEPS - 1])
    if facts.steps > _INTERRUPTIONS[-1]:
        fault: str | None = f"its state still changes its structure in step {facts.steps}"
        facts = StateFacts(2, facts.numbers)
    else:
        fault = _difference(imported, groups, facts, weights)
    warning = None
    if fault:
        warning = ConfigError(
            f"`--optimizer {path}` does not resume bitwise: a resumed run would differ from an "
            "uninterrupted one",
            why=f"in a trial of {_STEPS} steps {fault}",
            hint="tensors and numbers in `state`, and numbers in `param_groups` and attributes, "
            "are saved; if the run may be interrupted, choose another class",
        )
    elif facts.steps > 2:
        warning = ConfigError(
            f"`--optimizer {path}` cannot resume from a checkpoint before step {facts.steps}",
            why=f"the structure of its state changes until step {facts.steps}",
            hint=f"save at step {facts.steps} or later, or resume with `--no-load-optim`",
        )
    if warning and warns:
        logger.warning("%s", warning)
    return TorchOptimizer(groups, imported, facts)


def _uninterrupted(
    imported: ImportedClass, groups: Sequence[ParameterGroup], *, elementwise: bool
) -> tuple[list[list[Tensor]], StateFacts]:
    """Return the small parameters after each step, and properties of the class's state."""
    small = _small_groups(groups)
    parameters = _parameters(small)
    structure: Any = None
    complete = 0
    initial: list[dict[NumberPath, float | Tensor]] = []
    changed: dict[NumberPath, float | Tensor] = {}
    weights: list[list[Tensor]] = []
    for step, instance in enumerate(trial_steps(imported, small, _STEPS, _gradient, _rate)):
        now = [numbers(outside_state(instance, group)) for group in instance.param_groups]
        if not step:
            initial = now
            continue
        for before, after in zip(initial, now, strict=True):
            changed |= {
                path: number
                for path, number in after.items()
                if path not in before or float(before[path]) != float(number)
            }
        weights.append([parameter.detach().clone() for parameter in parameters])
        for parameter in parameters:
            for kind, leaf in flatten(instance.state[parameter]):
                _check_leaf(imported.path, kind, leaf, parameter, elementwise=elementwise)
        found = [_structure(instance.state[parameter]) for parameter in parameters]
        if found != structure:
            structure, complete = found, step
    return weights, StateFacts(max(complete, 2), changed)


def _difference(
    imported: ImportedClass,
    groups: Sequence[ParameterGroup],
    facts: StateFacts,
    weights: Sequence[Sequence[Tensor]],
) -> str | None:
    """Return how an interrupted run differs from the uninterrupted *weights*; None if it does not.

    Only saved state passes from one instance to the next, in the way of a checkpoint.  All steps
    come after the uninterrupted ones, so that counters of the module have other values.
    """
    saved: dict[str, Tensor] = {}
    begin = 0
    for end in (*(step for step in _INTERRUPTIONS if step >= facts.steps), _STEPS):
        small = _small_groups(groups)
        parameters = _parameters(small)
        try:
            optimizer = TorchOptimizer(small, imported, facts)
            if saved:
                fault = _load(optimizer, saved)
                if fault:
                    return f"{fault} after step {begin}"
            for step in range(begin, end):
                for parameter in parameters:
                    parameter.grad = _gradient(step, parameter)
                with fixed_random_numbers(parameters[0].device, step):
                    optimizer.step(_rate(step))
                if not all(map(_same, parameters, weights[step])):
                    return (
                        f"that was interrupted after step {begin}, the weights differ in step "
                        f"{step + 1}: state of the class is not saved, or a step depends on more "
                        "than weights, gradients and state"
                    )
            optimizer.eval_mode()
            saved = {name: tensor.clone() for name, tensor in _live(optimizer).items()}
        except Exception as error:  # noqa: BLE001 - of the class, which may raise any
            return f"that was interrupted after step {begin}, the class failed: {error_text(error)}"
        begin = end
    return None


def _load(optimizer: TorchOptimizer, saved: Mapping[str, Tensor]) -> str | None:
    """Load a fresh optimizer as a run does; return what the saved state lacks, None if nothing."""
    optimizer.eval_mode()
    with torch.no_grad():
        for name, tensor in _live(optimizer).items():
            if name not in saved or saved[name].shape != tensor.shape:
                return f"`{name.partition('.')[0]}` is not in the state, or of another shape,"
            tensor.copy_(saved[name])
    optimizer.train_mode()
    return None


def _live(optimizer: TorchOptimizer) -> dict[str, Tensor]:
    """Return state and weights by distinct names."""
    parameters = _parameters(optimizer.groups)
    return optimizer.state_tensors() | {
        f"weights.{index}": parameter.detach() for index, parameter in enumerate(parameters)
    }


def _check_rows(
    imported: ImportedClass, groups: Sequence[ParameterGroup], whole: Sequence[Tensor]
) -> None:
    """Raise unless rows alone are updated as they are within the *whole* parameters."""
    small = _small_groups(groups, _ROWS)
    for _ in trial_steps(
        imported, small, _ROWS_STEPS, lambda step, part: _gradient(step, part, _ROWS), _rate
    ):
        pass
    for part, expected in zip(_parameters(small), whole, strict=True):
        if not torch.allclose(part, expected[_ROWS], rtol=1e-5, atol=1e-6):
            raise ConfigError(
                f"`--optimizer {imported.path}` is not elementwise",
                why="it updates the first rows of a parameter otherwise if they are alone",
                hint="leave `--optimizer-elementwise` out",
            )


def _check_leaf(path: str, kind: str, leaf: Any, parameter: Tensor, *, elementwise: bool) -> None:
    if isinstance(leaf, CONSTANTS):
        return
    what = f"`--optimizer {path}` keeps `{kind}`"
    if not isinstance(leaf, (Tensor, int, float)) or "." in kind:
        raise ConfigError(
            f"{what}, which is of type {type(leaf).__name__}",
            why="a checkpoint has tensors and numbers only",
            hint="choose another class",
        )
    shape = leaf.shape if isinstance(leaf, Tensor) else torch.Size()
    if elementwise and shape not in {torch.Size(), parameter.shape}:
        raise ConfigError(
            f"{what} of shape {tuple(shape)} for a parameter of {tuple(parameter.shape)}",
            why="`--optimizer-elementwise` is given: the state of each weight is its own",
            hint="leave `--optimizer-elementwise` out",
        )


def _small_groups(
    groups: Sequence[ParameterGroup], rows: slice = slice(None)
) -> tuple[ParameterGroup, ...]:
    """Return two groups of *rows* of a small parameter, with the device and dtype of *groups*."""
    like = groups[0].parameters[0]
    generator = torch.Generator().manual_seed(0)
    decays = (groups[0].weight_decay, groups[-1].weight_decay)
    return tuple(
        ParameterGroup(
            (str(index),),
            (nn.Parameter(torch.randn(shape, generator=generator)[rows].to(like)),),
            decay,
        )
        for index, (shape, decay) in enumerate(zip(_SHAPES, decays, strict=True))
    )


def _parameters(groups: Sequence[ParameterGroup]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group.parameters]


def _gradient(step: int, parameter: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return *rows* of the gradient of a small parameter in a step."""
    generator = torch.Generator().manual_seed(step)
    gradients = {len(shape): torch.randn(shape, generator=generator) for shape in _SHAPES}
    return gradients[parameter.ndim][rows].to(parameter)


def _rate(step: int) -> float:
    """Return a learning rate that changes, as in a run."""
    return 1e-3 * (1 + step % 3)


def _structure(state: Any) -> dict[str, Any]:
    """Return all of a state but its values."""
    return {
        kind: (leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else copy.copy(leaf)
        if isinstance(leaf, CONSTANTS)
        else type(leaf)
        for kind, leaf in flatten(state)
    }


def _same(first: Tensor, second: Tensor) -> bool:
    """Return True if all numbers are equal, or not numbers in both."""
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
