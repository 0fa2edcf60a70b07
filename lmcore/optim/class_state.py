"""State of a `torch.optim.Optimizer` class as named tensors and numbers, and back.

Torch's classes keep the state of each parameter in `state`.  Some classes also count or sum in
their parameter groups or in attributes, such as the number of steps since the last update of a
preconditioner; such numbers belong to the state as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "NumberPath",
    "as_tensor",
    "constants",
    "flatten",
    "get_number",
    "numbers",
    "rebuild",
    "set_number",
]

NumberPath = tuple[str, ...]
"""Keys that lead to a number in nested dictionaries."""
_CONSTANTS = (type(None), str, bytes, set, frozenset)
"""Types of state that does not change after the first steps, and is not in a checkpoint."""
_NOT_NUMBERS = {"lr", "params", "state", "param_groups", "defaults"}
"""Keys of groups and attributes that the run sets, or that are saved in another way."""


def flatten(value: Any, kind: str = "") -> Iterator[tuple[str, Any]]:
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
        yield from flatten(member, f"{kind}_{key}" if kind else str(key))


def constants(value: Any) -> Iterator[Any]:
    """Yield copies of the constants of nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from constants(member)
    elif isinstance(value, _CONSTANTS):
        yield copy.copy(value)


def rebuild(template: Any, values: Mapping[str, Tensor], kind: str = "") -> Any:
    """Return *template* with other leaves, by their kinds in `flatten`."""
    if isinstance(template, Mapping):
        rebuilt: Any = copy.copy(template)  # keeps the type, such as `defaultdict`
        for key, member in template.items():
            rebuilt[key] = rebuild(member, values, f"{kind}_{key}" if kind else str(key))
        return rebuilt
    if isinstance(template, (list, tuple)):
        return type(template)(
            rebuild(member, values, f"{kind}_{index}") for index, member in enumerate(template)
        )
    if isinstance(template, _CONSTANTS):
        return copy.copy(template)
    return values[kind] if isinstance(template, Tensor) else _as_number(values[kind], template)


def numbers(values: Mapping[Any, Any]) -> dict[NumberPath, float | Tensor]:
    """Return copies of the numbers and scalar tensors in nested dictionaries with text keys.

    Lists are left out: they may have a member for each parameter.

    Args:
        values: A parameter group, or the attributes of an optimizer.
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


def get_number(values: dict[str, Any], path: NumberPath, default: float | Tensor) -> Any:
    """Return the number at *path* in nested dictionaries, *default* if none is there yet."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return default if value is None else value


def set_number(
    values: dict[str, Any], path: NumberPath, loaded: Tensor, like: float | Tensor
) -> None:
    """Set the number at *path* in nested dictionaries to a loaded one, of the type of *like*."""
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = _as_number(loaded, like)


def as_tensor(leaf: Any) -> Tensor:
    """Return a tensor itself, and a number as a float64 or int64 tensor."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)


def _as_number(tensor: Tensor, like: Any) -> Any:
    return tensor.to(like.device) if isinstance(like, Tensor) else type(like)(tensor.item())
