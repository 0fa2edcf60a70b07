"""`Optimizer` around a `torch.optim.Optimizer` class, given by `--optimizer module:Class`.

The class creates its state in its first steps; before that, its structure is unknown.
`lmcore.optim.class_trial` finds by a trial when the state is complete; if a checkpoint is loaded,
as many steps of clones of all parameters give names, shapes and types of the state.

Torch's classes keep the state of each parameter in `state`.  Some classes also count or sum in
their parameter groups or in attributes, such as the number of steps since the last update of a
preconditioner; such numbers belong to the state as well.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.base.errors import ConfigError
from lmcore.optim.imported_class import INITIAL_RATE, ImportedClass, error_text
from lmcore.optim.optimizer import Optimizer, ParameterGroup

NumberPath = tuple[str, ...]
"""Keys that lead to a number in nested dictionaries."""
CONSTANTS = (type(None), str, bytes, set, frozenset)
"""Types of state that does not change after the first steps, and is not in a checkpoint."""
_NOT_NUMBERS = {"lr", "params", "state", "param_groups", "defaults"}
"""Keys of groups and attributes that the run sets, or that are saved in another way."""
_STEPS = "steps_taken"
"""Kind of the state tensor that counts steps; 0: the class has no state yet."""


@dataclass(frozen=True)
class StateFacts:
    """Properties of a class's state, found by a trial.

    Attributes:
        steps: Number of steps after which the state is complete.
        numbers: Numbers outside of `state` that steps change, with an example of each, by their
            path from `outside_state`.
    """

    steps: int = 2
    numbers: Mapping[NumberPath, float | Tensor] = field(default_factory=dict)


class TorchOptimizer(Optimizer):
    """A `torch.optim.Optimizer` with the learning rate, weight decay and checkpoints of a run."""

    def __init__(
        self, groups: tuple[ParameterGroup, ...], imported: ImportedClass, facts: StateFacts
    ) -> None:
        """Create an instance of the class, whose state has the properties *facts*."""
        super().__init__(groups)
        self._class = imported
        self._facts = facts
        self._optimizer = imported.create(groups) if groups else None
        self._steps = 0
        self._exported: dict[str, Tensor] | None = None  # None: training; empty: not asked for yet
        self._templates: dict[str, dict[Any, Any]] = {}
        call_if_defined(self._optimizer, "train")

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        if self._optimizer is None:
            return
        gradients = [group.gradients() for group in self.groups]
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        self._templates.clear()
        for members, kept in zip(self.groups, gradients, strict=True):
            for parameter, gradient in zip(members.parameters, kept, strict=True):
                parameter.grad = gradient  # some classes drop it; the run's buffers stay

    def eval_mode(self) -> None:
        """Call the class's `eval`; `state_tensors` returns the same tensors until `train_mode`."""
        self._begin_change()
        call_if_defined(self._optimizer, "eval")
        if self._exported is None:
            self._exported = {}

    def train_mode(self) -> None:
        """Take over the state that was loaded, if any, and call the class's `train`.

        A copy of the state ends here: the class may change weights in backward, too.
        """
        self._begin_change()
        exported, self._exported = self._exported, None
        if exported and not self._steps:
            self._load(exported)
        self._templates.clear()
        call_if_defined(self._optimizer, "train")

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state by name, KIND.PARAMETER; numbers as float64 or int64 tensors.

        Before the first step the values are zeros, of the structure that the state will have.
        Loaded values are used from the next `train_mode` on.
        """
        if self._exported:
            return self._exported
        found: dict[str, Tensor] = {}
        for members, outside in self._outside():
            for name, parameter in zip(members.names, members.parameters, strict=True):
                found[f"{_STEPS}.{name}"] = torch.tensor(self._steps)
                for kind, leaf in flatten(self._state_of(name, parameter)):
                    if not isinstance(leaf, CONSTANTS):
                        found[f"{kind}.{name}"] = _as_tensor(leaf)
                for path, example in self._facts.numbers.items():
                    found[f"{_kind(path)}.{name}"] = _as_tensor(_number(outside, path, example))
        if self._exported is not None:
            self._exported = found
        return found

    def _load(self, loaded: Mapping[str, Tensor]) -> None:
        """Give the class the state of a checkpoint, named as `state_tensors` names it."""
        assert self._optimizer is not None, "it has state"
        for members, outside in self._outside():
            for name, parameter in zip(members.names, members.parameters, strict=True):
                self._steps = int(loaded[f"{_STEPS}.{name}"])
                if not self._steps:
                    return  # the checkpoint was saved before the first step, or none was loaded
                self._optimizer.state[parameter] = _rebuild(self._templates[name], loaded, name)
            for path, example in self._facts.numbers.items():
                loaded_number = loaded[f"{_kind(path)}.{members.names[0]}"]
                _set_number(outside, path, _as_number(loaded_number, example))

    def _outside(self) -> Iterator[tuple[ParameterGroup, dict[str, Any]]]:
        if self._optimizer is not None:
            for members, group in zip(self.groups, self._optimizer.param_groups, strict=True):
                yield members, outside_state(self._optimizer, group)

    def _state_of(self, name: str, parameter: nn.Parameter) -> Any:
        """Return the live state of a parameter; before the first step a template of it."""
        assert self._optimizer is not None, "a parameter belongs to it"
        if self._steps:
            return self._optimizer.state[parameter]
        if not self._templates:
            generator = torch.Generator().manual_seed(1)
            clones = [
                replace(group, parameters=tuple(map(_clone, group.parameters)))
                for group in self.groups
            ]
            steps = trial_steps(
                self._class,
                clones,
                self._facts.steps,
                lambda _, one: torch.randn(one.shape, generator=generator).to(one),
            )
            *_, instance = steps
            for group in clones:
                for own_name, clone in zip(group.names, group.parameters, strict=True):
                    self._templates[own_name] = dict(instance.state[clone])
            for _, leaf in flatten(self._templates):
                if isinstance(leaf, Tensor):
                    leaf.detach().zero_()
        return self._templates[name]


def trial_steps(
    imported: ImportedClass,
    groups: Sequence[ParameterGroup],
    steps: int,
    gradient: Callable[[int, nn.Parameter], Tensor],
    rate: Callable[[int], float] = lambda _: INITIAL_RATE,
) -> Iterator[torch.optim.Optimizer]:
    """Take steps outside of training, which leave the random numbers as they were.

    Yields a new instance for *groups*, before the first step and after each.

    Raises:
        ConfigError: The class cannot be created, or cannot take a step.
    """
    instance = imported.create(groups)
    call_if_defined(instance, "train")
    yield instance
    for step in range(steps):
        for group in instance.param_groups:
            group["lr"] = rate(step)
            for parameter in group["params"]:
                parameter.grad = gradient(step, parameter)
        try:
            with fixed_random_numbers(groups[0].parameters[0].device, step):
                instance.step()
        except Exception as error:
            raise ConfigError(
                f"`--optimizer {imported.path}` cannot take a step",
                why=error_text(error),
                hint="gradients are dense and real here, and `step` gets no closure; choose a "
                "class or `--optimizer-args` for that",
            ) from error
        yield instance


def call_if_defined(instance: torch.optim.Optimizer | None, name: str) -> None:
    """Call the method `train` or `eval` of a class that has one."""
    method = getattr(instance, name, None)
    if callable(method):
        method()


@contextlib.contextmanager
def fixed_random_numbers(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random numbers of host and *device* within the context, and restore them after."""
    forked = (
        torch.random.fork_rng(devices=[])
        if device.type == "cpu"
        else torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)
    )
    with forked:
        torch.manual_seed(seed)
        yield


def flatten(value: Any, kind: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists and tuples by kind, their keys joined by `_`."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield kind, value
        return
    for key, member in _members(value):
        yield from flatten(member, f"{kind}_{key}" if kind else str(key))


def outside_state(instance: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the dictionaries with numbers that a class may keep outside of `state`."""
    return {"group": group, "attribute": vars(instance)}


def numbers(values: Mapping[Any, Any]) -> dict[NumberPath, float | Tensor]:
    """Return copies of the numbers and scalar tensors in nested dictionaries with text keys.

    Lists are left out: they may have a member for each parameter.
    """
    found: dict[NumberPath, float | Tensor] = {}
    for key, value in values.items():
        if not isinstance(key, str) or "." in key or key in _NOT_NUMBERS:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key,] = value.detach().clone()
        elif isinstance(value, (int, float)):
            found[key,] = value
        elif isinstance(value, dict):
            found |= {(key, *path): number for path, number in numbers(value).items()}
    return found


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, Mapping) else enumerate(value)


def _rebuild(template: Any, loaded: Mapping[str, Tensor], name: str, kind: str = "") -> Any:
    """Return *template* with the leaves KIND.NAME, by their kinds in `flatten`."""
    if isinstance(template, (Mapping, list, tuple)):
        rebuilt = {
            key: _rebuild(member, loaded, name, f"{kind}_{key}" if kind else str(key))
            for key, member in _members(template)
        }
        if not isinstance(template, Mapping):
            return type(template)(rebuilt.values())
        kept: Any = copy.copy(template)  # keeps the type, such as `defaultdict`
        kept.update(rebuilt)
        return kept
    if isinstance(template, CONSTANTS):
        return copy.copy(template)
    found = loaded[f"{kind}.{name}"]
    return found if isinstance(template, Tensor) else _as_number(found, template)


def _number(values: dict[str, Any], path: NumberPath, default: float | Tensor) -> Any:
    """Return the number at *path* in nested dictionaries, *default* if none is there yet."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return default if value is None else value


def _set_number(values: dict[str, Any], path: NumberPath, number: Any) -> None:
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = number


def _kind(path: NumberPath) -> str:
    return "_".join(path)


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)


def _as_number(tensor: Tensor, like: Any) -> Any:
    return tensor.to(like.device) if isinstance(like, Tensor) else type(like)(tensor.item())


def _clone(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())
