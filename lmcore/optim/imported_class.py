"""Import of a `torch.optim.Optimizer` class and its arguments, for `--optimizer module:Class`."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcore.base.errors import ConfigError, suggestion
from lmcore.optim.optimizer import ParameterGroup

INITIAL_RATE = 1e-3
"""Learning rate of new instances; the run sets another before each step."""
_OURS = {
    "params": "the model's parameters are all trained",
    "lr": "the learning rate is `--lr`",
    "weight_decay": "the weight decay is `--weight-decay`",
}
_USABLE = (
    "give the import path of a class derived from `torch.optim.Optimizer`, such as "
    "`--optimizer torch.optim:NAdam`"
)
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class ImportedClass:
    """An optimizer class with the user's arguments.

    Attributes:
        path: Import path, "module:Class".
        optimizer_class: The class.
        arguments: Values of `--optimizer-args`, by name.
    """

    path: str
    optimizer_class: type[Any]
    arguments: dict[str, Any]

    @classmethod
    def load(cls, path: str, arguments: Sequence[str] = ()) -> ImportedClass:
        """Import the class of *path* and read its *arguments*, "key=value".

        Raises:
            ConfigError: There is no such class, or an argument is wrong.
        """
        optimizer_class = _load_class(path)
        return cls(path, optimizer_class, _parse_arguments(arguments, optimizer_class, path))

    def create(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Return an instance for *groups*.

        Raises:
            ConfigError: The class refuses its arguments, or has no weight decay and needs one.
        """
        decays = "weight_decay" in _parameters(self.optimizer_class)
        if not decays and any(group.weight_decay for group in groups):
            raise ConfigError(
                f"`--optimizer {self.path}` has no weight decay",
                why="the class has no argument `weight_decay`",
                hint="add `--weight-decay 0`",
            )
        members = [
            {"params": list(group.parameters)}
            | ({"weight_decay": group.weight_decay} if decays else {})
            for group in groups
        ]
        try:
            instance: torch.optim.Optimizer
            instance = self.optimizer_class(members, lr=INITIAL_RATE, **self.arguments)
        except Exception as error:
            raise ConfigError(
                f"`--optimizer {self.path}` cannot be created",
                why=error_text(error),
                hint="look at the class's own documentation; give its arguments by "
                "`--optimizer-args key=value`",
            ) from error
        return instance


def _load_class(path: str) -> type[torch.optim.Optimizer]:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"`--optimizer {path}` names no class", hint=_USABLE)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        found = isinstance(error, ModuleNotFoundError) and error.name
        missing = found and (module_name == found or module_name.startswith(f"{found}."))
        raise ConfigError(
            f"`--optimizer {path}`: "
            + ("no such module" if missing else "the module cannot be imported"),
            why=error_text(error),
            hint="install its package, or put its folder on PYTHONPATH"
            if missing
            else f"`python -c 'import {module_name}'` shows where it fails",
        ) from error
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if getattr(module, name, None) is None:
        raise ConfigError(
            f"`--optimizer {path}`: `{module_name}` has no `{name}`",
            hint=suggestion(name, classes) if classes else _USABLE,
        )
    if name not in classes:
        raise ConfigError(
            f"`--optimizer {path}` is not an optimizer",
            why="it is not a class derived from `torch.optim.Optimizer`",
            hint=suggestion(name, classes) if classes else _USABLE,
        )
    closure = inspect.signature(classes[name].step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"`--optimizer {path}` needs a closure",
            why="its `step` computes the loss again, several times in a step; a run computes it "
            "once",
            hint="choose a class whose `step` can be called without a closure",
        )
    return classes[name]


def _parse_arguments(arguments: Sequence[str], kind: type[Any], path: str) -> dict[str, Any]:
    """Return the values of "key=value" arguments: Python literals, `true`, `false`, or text."""
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
                hint=suggestion(key, own)
                if (own := known - _OURS.keys())
                else "the class has no arguments but those that the run sets",
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


def error_text(error: Exception) -> str:
    """Return the type and message of an error, in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
