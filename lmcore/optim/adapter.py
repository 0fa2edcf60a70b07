"""Adapter for any `torch.optim.Optimizer` class, given by `--optimizer module:Class`.

The class creates its state in its first step; before that, its structure is unknown.  Each class is
therefore tried on two small parameters when the optimizer is created, which finds a class that
cannot train here, and, if a checkpoint is loaded, on clones of all parameters, which give names,
shapes and types of its state.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.errors import ConfigError, suggestion
from lmcore.optim.optimizer import Optimizer, ParameterGroup

__all__ = ["TorchOptimizer", "load_class", "parse_arguments"]

_STEPS = "steps_taken"
"""Kind of the state tensor that counts steps; 0: the class has no state yet."""
_GROUP = "group_"
"""Prefix of kinds that keep a parameter group's numbers, such as its own step count."""
_OURS = {
    "params": "the model's parameters are all trained",
    "lr": "the learning rate is `--lr`",
    "weight_decay": "the weight decay is `--weight-decay`",
}
_TRIAL_SHAPES = ((4, 6), (6,))
_TRIAL_RATE = 1e-3
_TRIAL_STEPS = 2  # some classes only create their state in the first step, and use it in the second
_CONSTANTS = (type(None), str, bytes, set, frozenset)
"""Types of state that does not change after the first steps, and is not in a checkpoint."""
_WORDS = {"true": True, "false": False, "none": None}


class TorchOptimizer(Optimizer):
    """A `torch.optim.Optimizer` with the learning rate, weight decay and checkpoints of a run.

    The state must be in `state` and `param_groups`, as tensors and numbers: a run that resumes is
    then bitwise the unbroken one.
    """

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        path: str,
        arguments: Sequence[str] = (),
        *,
        elementwise: bool = False,
    ) -> None:
        """Load the class and try it on small parameters.

        Args:
            groups: Parameters to train, from `parameter_groups`.
            path: Import path of the class, "module:Class".
            arguments: Arguments of the class, as "key=value".
            elementwise: True if the user says that the class updates each weight from its own
                gradient and state alone, so that parameters may be sharded.

        Raises:
            ConfigError: There is no such class, it refuses its arguments, or it cannot train here.
        """
        super().__init__(groups)
        self._path = path
        self._class = load_class(path)
        self._arguments = parse_arguments(arguments, self._class, path)
        if "weight_decay" not in _parameters(self._class):
            _require_no_decay(groups, path)
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0
        self._group_numbers: dict[str, float | Tensor] = {}
        self._evaluating = False
        self._exported: dict[str, Tensor] | None = None
        self._templates: dict[str, dict[Any, Any]] = {}
        if groups:
            self._group_numbers = self._try(elementwise=elementwise)
            self._optimizer = self._create_class(groups)
            self._call("train")

    @torch.no_grad()
    def step(self, lr: float) -> None:
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
                    found[f"{kind}.{name}"] = _as_tensor(leaf)
        if self._evaluating:
            self._exported = found
        return found

    def eval_mode(self) -> None:
        """Call the class's `eval`; `state_tensors` returns the same tensors until `train_mode`."""
        self._call("eval")
        self._evaluating = True

    def train_mode(self) -> None:
        """Take over the state that was loaded, if any, and call the class's `train`."""
        exported, self._exported, self._evaluating = self._exported, None, False
        if exported and not self._steps:
            self._load(exported)
        self._templates.clear()
        self._call("train")

    def _call(self, name: str) -> None:
        method = getattr(self._optimizer, name, None)
        if callable(method):
            method()

    def _create_class(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Return an instance of the class for *groups*."""
        decay = "weight_decay" in _parameters(self._class)
        members = [
            {"params": list(group.parameters)}
            | ({"weight_decay": group.weight_decay} if decay else {})
            for group in groups
        ]
        try:
            made: torch.optim.Optimizer
            made = self._class(members, lr=_TRIAL_RATE, **self._arguments)
        except Exception as error:
            raise ConfigError(
                f"`--optimizer {self._path}` cannot be created",
                why=_text(error),
                hint="look at the class's own documentation; give its arguments by "
                "`--optimizer-args key=value`",
            ) from error
        return made

    def _try(self, *, elementwise: bool) -> dict[str, float | Tensor]:
        """Take steps with small parameters; return the numbers that the groups keep."""
        made, small = self._trial(slice(None))
        before = [_numbers(group) for group in made.param_groups]
        outside = _numbers_outside(made)
        self._take_steps(made, small, slice(None))
        if _numbers_outside(made) != outside:
            raise ConfigError(
                f"`--optimizer {self._path}` keeps state outside of `state` and `param_groups`",
                why="a checkpoint would not have it, and a run that resumes would be another one",
                hint="choose another class",
            )
        for parameter in small:
            for kind, leaf in _flatten(made.state[parameter]):
                self._check_leaf(kind, leaf, parameter, elementwise=elementwise)
        if elementwise:
            self._check_parts(small)
        states = [made.state[parameter] for parameter in small]
        constants = [list(_constants(state)) for state in states]
        self._take_steps(made, small, slice(None))
        if [list(_constants(state)) for state in states] != constants:
            raise ConfigError(
                f"`--optimizer {self._path}` keeps text or sets that change from step to step",
                why="a checkpoint has tensors and numbers only",
                hint="choose another class",
            )
        return {
            key: group[key]
            for numbers, group in zip(before, made.param_groups, strict=True)
            for key, value in _numbers(group).items()
            if key not in numbers or numbers[key] != value
        }

    def _trial(self, rows: slice) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Return an instance of the class for *rows* of small parameters, one a group."""
        like = self.groups[0].parameters[0]
        generator = torch.Generator().manual_seed(0)
        small = [
            nn.Parameter(torch.randn(shape, generator=generator)[rows].to(like))
            for shape in _TRIAL_SHAPES
        ]
        decays = (self.groups[0].weight_decay, self.groups[-1].weight_decay)
        groups = [
            ParameterGroup((str(index),), (parameter,), decay)
            for index, (parameter, decay) in enumerate(zip(small, decays, strict=True))
        ]
        return self._create_class(groups), small

    def _check_parts(self, whole: Sequence[nn.Parameter]) -> None:
        """Raise unless rows alone are updated as they are within the *whole* parameters."""
        rows = slice(0, 2)
        made, parts = self._trial(rows)
        self._take_steps(made, parts, rows)
        for part, parameter in zip(parts, whole, strict=True):
            if not torch.allclose(part, parameter[rows], rtol=1e-5, atol=1e-6):
                raise ConfigError(
                    f"`--optimizer {self._path}` is not elementwise",
                    why="it updates the first rows of a parameter otherwise if they are alone",
                    hint="leave `--optimizer-elementwise` out",
                )

    def _take_steps(
        self,
        made: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        rows: slice | None = None,
    ) -> None:
        """Take steps with random gradients; *rows* selects rows of the small parameters'."""
        generator = torch.Generator().manual_seed(1)
        train = getattr(made, "train", None)
        if callable(train):
            train()
        for _ in range(_TRIAL_STEPS):
            shapes = (
                [parameter.shape for parameter in parameters] if rows is None else _TRIAL_SHAPES
            )
            for parameter, shape in zip(parameters, shapes, strict=True):
                gradient = torch.randn(shape, generator=generator)
                parameter.grad = (gradient if rows is None else gradient[rows]).to(parameter)
            try:
                with torch.random.fork_rng(devices=[]):
                    made.step()
            except Exception as error:
                raise ConfigError(
                    f"`--optimizer {self._path}` cannot take a step",
                    why=_text(error),
                    hint="gradients are dense and real here, and `step` gets no closure; choose a "
                    "class or `--optimizer-args` for that",
                ) from error

    def _check_leaf(self, kind: str, leaf: Any, parameter: Tensor, *, elementwise: bool) -> None:
        what = f"`--optimizer {self._path}` keeps `{kind}`"
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

    def _leaves(
        self, name: str, parameter: nn.Parameter, index: int
    ) -> Iterator[tuple[str, Tensor | float]]:
        """Yield the state of a parameter, and the numbers of its group, by kind."""
        assert self._optimizer is not None, "a parameter belongs to it"
        if self._steps:
            yield from _flatten(self._optimizer.state[parameter])
        else:
            yield from _flatten(self._template(name))
        for key, number in self._group_numbers.items():
            yield f"{_GROUP}{key}", self._optimizer.param_groups[index].get(key, number)

    def _template(self, name: str) -> dict[Any, Any]:
        """Return the state of a parameter after some steps of clones, with tensors set to zero."""
        if not self._templates:
            clones = [
                replace(group, parameters=tuple(map(_clone, group.parameters)))
                for group in self.groups
            ]
            made = self._create_class(clones)
            self._take_steps(made, [one for group in clones for one in group.parameters])
            for group in clones:
                for own_name, clone in zip(group.names, group.parameters, strict=True):
                    self._templates[own_name] = dict(made.state[clone])
            for _, leaf in _flatten(self._templates):
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
                values = {kind: loaded[f"{kind}.{name}"] for kind, _ in _flatten(template)}
                self._optimizer.state[parameter] = _rebuild(template, values)
            for key, number in self._group_numbers.items():
                group[key] = _as_number(loaded[f"{_GROUP}{key}.{members.names[0]}"], number)


def load_class(path: str) -> type[Any]:
    """Return the class of the import path "module:Class".

    Raises:
        ConfigError: There is no such module or class, or it is no optimizer that can train here.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        found = isinstance(error, ModuleNotFoundError) and error.name
        missing = found and (module_name == found or module_name.startswith(f"{found}."))
        raise ConfigError(
            f"`--optimizer {path}`: "
            + ("no such module" if missing else "the module cannot be imported"),
            why=_text(error),
            hint="install its package, or put its folder on PYTHONPATH"
            if missing
            else f"`python -c 'import {module_name}'` shows where it fails",
        ) from error
    found_class = getattr(module, name, None)
    classes = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ]
    if found_class is None:
        raise ConfigError(
            f"`--optimizer {path}`: `{module_name}` has no `{name}`",
            hint=suggestion(name, classes),
        )
    if name not in classes:
        raise ConfigError(
            f"`--optimizer {path}` is not an optimizer",
            why="it is not a class derived from `torch.optim.Optimizer`",
            hint=suggestion(name, classes),
        )
    closure = inspect.signature(found_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"`--optimizer {path}` needs a closure",
            why="its `step` computes the loss again, several times in a step; a run computes it "
            "once",
            hint="choose a class whose `step` can be called without a closure",
        )
    assert isinstance(found_class, type), "it is among the classes"
    return found_class


def parse_arguments(arguments: Sequence[str], kind: type[Any], path: str) -> dict[str, Any]:
    """Return the values of "key=value" arguments: Python literals, `true`, `false`, or text.

    Raises:
        ConfigError: An argument is malformed, unknown to the class, or set by the run.
    """
    known = _parameters(kind)
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(
                f"`--optimizer-args {argument}` is not an argument",
                hint="write `key=value`, such as `betas=0.9,0.95`",
            )
        if key in _OURS:
            raise ConfigError(
                f"`--optimizer-args {argument}`: the run sets `{key}` itself", why=_OURS[key]
            )
        if key in values:
            raise ConfigError(f"`--optimizer-args {argument}`: `{key}` is given twice")
        if key not in known and not _takes_any(kind):
            raise ConfigError(
                f"`--optimizer-args {argument}`: `{path}` has no argument `{key}`",
                hint=suggestion(key, known - _OURS.keys()),
            )
        values[key] = _literal(text)
    return values


def _parameters(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


def _takes_any(kind: type) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _require_no_decay(groups: Sequence[ParameterGroup], path: str) -> None:
    if any(group.weight_decay for group in groups):
        raise ConfigError(
            f"`--optimizer {path}` has no weight decay",
            why="the class has no argument `weight_decay`",
            hint="add `--weight-decay 0`",
        )


def _flatten(value: Any, kind: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves but constants of nested dicts, lists and tuples; keys are joined by `_`."""
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = dict(enumerate(value)).items()
    else:
        if not isinstance(value, _CONSTANTS):
            yield kind, value
        return
    for key, member in pairs:
        yield from _flatten(member, f"{kind}_{key}" if kind else str(key))


def _constants(value: Any) -> Iterator[Any]:
    """Yield copies of the constants of nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from _constants(member)
    elif isinstance(value, _CONSTANTS):
        yield copy.copy(value)


def _rebuild(template: Any, values: Mapping[str, Tensor], kind: str = "") -> Any:
    """Return *template* with other leaves, by their kinds in `_flatten`."""
    if isinstance(template, Mapping):
        return {
            key: _rebuild(member, values, f"{kind}_{key}" if kind else str(key))
            for key, member in template.items()
        }
    if isinstance(template, (list, tuple)):
        return type(template)(
            _rebuild(member, values, f"{kind}_{index}") for index, member in enumerate(template)
        )
    if isinstance(template, _CONSTANTS):
        return copy.copy(template)
    return values[kind] if isinstance(template, Tensor) else _as_number(values[kind], template)


def _clone(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)


def _as_number(tensor: Tensor, like: Any) -> Any:
    """Return a loaded number as the type of *like*."""
    return tensor.to(like.device) if isinstance(like, Tensor) else type(like)(tensor.item())


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a parameter group's numbers, but for the learning rate."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "lr"
        and (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1))
    }


def _numbers_outside(made: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers among the attributes of an optimizer, which no checkpoint would have."""
    return {
        key: value
        for key, value in vars(made).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
