"""`Optimizer` around a `torch.optim.Optimizer` class, given by `--optimizer module:Class`.

The class creates its state in its first steps; before that, its structure is unknown.
`lmcore.optim.class_trial` finds by a trial when the state is complete; if a checkpoint is loaded,
as many steps of clones of all parameters give names, shapes and types of the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.base.errors import ConfigError
from lmcore.optim.class_state import NumberPath, as_tensor, flatten, get_number, rebuild, set_number
from lmcore.optim.imported_class import ImportedClass, error_text
from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = [
    "StateFacts",
    "TorchOptimizer",
    "call_if_defined",
    "fixed_random_numbers",
    "step_class",
]

_STEPS = "steps_taken"
"""Kind of the state tensor that counts steps; 0: the class has no state yet."""
_GROUP = "group_"
"""Prefix of kinds that keep a parameter group's numbers, such as its own step count."""
_ATTRIBUTE = "attribute_"
"""Prefix of kinds that keep numbers among the attributes of the optimizer."""


@dataclass(frozen=True)
class StateFacts:
    """Properties of a class's state, found by a trial.

    Attributes:
        steps: Number of steps after which the state is complete.
        group_numbers: Numbers of parameter groups that steps change, with an example of each.
        attribute_numbers: Numbers among the optimizer's attributes that steps change, with an
            example of each.
    """

    steps: int = 2
    group_numbers: Mapping[NumberPath, float | Tensor] = field(default_factory=dict)
    attribute_numbers: Mapping[NumberPath, float | Tensor] = field(default_factory=dict)


class TorchOptimizer(Optimizer):
    """A `torch.optim.Optimizer` with the learning rate, weight decay and checkpoints of a run."""

    def __init__(
        self, groups: tuple[ParameterGroup, ...], imported: ImportedClass, facts: StateFacts
    ) -> None:
        """Create an instance of the class.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            imported: The class and its arguments.
            facts: Properties of its state.
        """
        super().__init__(groups)
        self._class = imported
        self._facts = facts
        self._optimizer = imported.create(groups) if groups else None
        self._steps = 0
        self._evaluating = False
        self._exported: dict[str, Tensor] | None = None
        self._templates: dict[str, dict[Any, Any]] = {}
        call_if_defined(self._optimizer, "train")

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
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

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state by name, KIND.PARAMETER; numbers as float64 or int64 tensors.

        Before the first step the values are zeros, of the structure that the state will have.
        Loaded values are used from the next `train_mode` on.
        """
        if self._exported is not None:
            return self._exported
        found: dict[str, Tensor] = {}
        for index, group in enumerate(self.groups):
            for name, parameter in zip(group.names, group.parameters, strict=True):
                found[f"{_STEPS}.{name}"] = torch.tensor(self._steps)
                for kind, leaf in self._leaves(name, parameter, index):
                    found[f"{kind}.{name}"] = as_tensor(leaf)
        if self._evaluating:
            self._exported = found
        return found

    def eval_mode(self) -> None:
        """Call the class's `eval`; `state_tensors` returns the same tensors until `train_mode`."""
        self._begin_change()
        call_if_defined(self._optimizer, "eval")
        self._evaluating = True

    def train_mode(self) -> None:
        """Take over the state that was loaded, if any, and call the class's `train`.

        A copy of the state ends here: the class may change weights in backward, too.
        """
        self._begin_change()
        exported, self._exported, self._evaluating = self._exported, None, False
        if exported and not self._steps:
            self._load(exported)
        self._templates.clear()
        call_if_defined(self._optimizer, "train")

    def _leaves(
        self, name: str, parameter: nn.Parameter, index: int
    ) -> Iterator[tuple[str, Tensor | float]]:
        """Yield the state of a parameter, and numbers of its group and the optimizer, by kind."""
        assert self._optimizer is not None, "a parameter belongs to it"
        if self._steps:
            yield from flatten(self._optimizer.state[parameter])
        else:
            yield from flatten(self._template(name))
        group = self._optimizer.param_groups[index]
        for path, number in self._facts.group_numbers.items():
            yield _kind(_GROUP, path), get_number(group, path, number)
        for path, number in self._facts.attribute_numbers.items():
            yield _kind(_ATTRIBUTE, path), get_number(vars(self._optimizer), path, number)

    def _template(self, name: str) -> dict[Any, Any]:
        """Return the state of a parameter after some steps of clones, with tensors set to zero."""
        if not self._templates:
            clones = [
                replace(group, parameters=tuple(map(_clone, group.parameters)))
                for group in self.groups
            ]
            instance = self._class.create(clones)
            generator = torch.Generator().manual_seed(1)

            def random_gradient(parameter: nn.Parameter) -> Tensor:
                return torch.randn(parameter.shape, generator=generator).to(parameter)

            call_if_defined(instance, "train")
            for step in range(self._facts.steps):
                step_class(self._class.path, instance, random_gradient, seed=step)
            for group in clones:
                for own_name, clone in zip(group.names, group.parameters, strict=True):
                    self._templates[own_name] = dict(instance.state[clone])
            for _, leaf in flatten(self._templates):
                if isinstance(leaf, Tensor):
                    leaf.detach().zero_()
        return self._templates[name]

    def _load(self, loaded: Mapping[str, Tensor]) -> None:
        """Give the class the state of a checkpoint."""
        assert self._optimizer is not None, "it has state"
        for members, group in zip(self.groups, self._optimizer.param_groups, strict=True):
            for name, parameter in zip(members.names, members.parameters, strict=True):
                self._steps = int(loaded[f"{_STEPS}.{name}"])
                if not self._steps:
                    return  # the checkpoint was saved before the first step, or none was loaded
                template = self._templates[name]
                values = {kind: loaded[f"{kind}.{name}"] for kind, _ in flatten(template)}
                self._optimizer.state[parameter] = rebuild(template, values)
            first = members.names[0]
            for path, number in self._facts.group_numbers.items():
                set_number(group, path, loaded[f"{_kind(_GROUP, path)}.{first}"], number)
            for path, number in self._facts.attribute_numbers.items():
                value = loaded[f"{_kind(_ATTRIBUTE, path)}.{first}"]
                set_number(vars(self._optimizer), path, value, number)


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


def step_class(
    path: str,
    instance: torch.optim.Optimizer,
    gradient: Callable[[nn.Parameter], Tensor],
    *,
    seed: int,
) -> None:
    """Take a step outside of training, which leaves the random numbers as they were.

    Args:
        path: Import path of the class, for the message.
        instance: The optimizer.
        gradient: Function that returns the gradient of a parameter.
        seed: Seed of the random numbers in the step.

    Raises:
        ConfigError: The class cannot take the step.
    """
    for group in instance.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient(parameter)
    try:
        with fixed_random_numbers(instance.param_groups[0]["params"][0].device, seed):
            instance.step()
    except Exception as error:
        raise ConfigError(
            f"`--optimizer {path}` cannot take a step",
            why=error_text(error),
            hint="gradients are dense and real here, and `step` gets no closure; choose a "
            "class or `--optimizer-args` for that",
        ) from error


def _kind(prefix: str, path: NumberPath) -> str:
    return prefix + "_".join(path)


def _clone(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())
