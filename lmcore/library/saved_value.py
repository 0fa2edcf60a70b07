"""Values of a checkpoint as JSON: tensors by their names, and what JSON itself cannot have.

A mapping with one reserved key is in the place of a tensor, of a mapping with keys that are no text
(as schedulers of torch have), and of a number that is not finite (as the best loss so far may be).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lmcore.base.errors import ConfigError

__all__ = ["decode", "encode", "has_tensors", "is_value"]

_TENSOR = "tensor of the checkpoint"
_ITEMS = "items of a mapping"
_NUMBER = "number that is not finite"
_SCALARS = (str, int, float, type(None))  # bool is an int


def encode(name: str, value: Any, add: Callable[[str, Tensor], None]) -> Any:
    """Return a value as JSON, and add its tensors to the checkpoint.

    Args:
        name: Name of the value in the checkpoint, such as "scheduler.base_lrs".
        value: Value of JSON types and tensors.
        add: Function that adds a tensor to the checkpoint, by its name.

    Raises:
        ConfigError: The value has something else.
    """
    if isinstance(value, Tensor):
        add(name, value)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return _encoded_mapping(name, value, add)
    if isinstance(value, (list, tuple)):
        return [encode(f"{name}.{index}", each, add) for index, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(float(value))}
    if not isinstance(value, _SCALARS):
        raise ConfigError(
            f"`save` of {type(value).__name__}, `{name}`",
            why="it is neither a model, an optimizer, a tensor nor a JSON value, and has no "
            "`state_dict`",
            hint="objects are not pickled: save its numbers, texts, lists and dicts",
        )
    return value


def _encoded_mapping(
    name: str, value: Mapping[Any, Any], add: Callable[[str, Tensor], None]
) -> Any:
    for key in value:
        if not isinstance(key, _SCALARS) or (isinstance(key, float) and not math.isfinite(key)):
            raise ConfigError(
                f"`save` of a mapping with the key {key!r}, `{name}`",
                why=f"JSON has no key of type {type(key).__name__}",
                hint="use texts or integers as keys, or save the list of its items",
            )
    encoded = {key: encode(f"{name}.{key}", each, add) for key, each in value.items()}
    if all(isinstance(key, str) for key in encoded) and not encoded.keys() & _RESERVED:
        return encoded
    return {_ITEMS: [[key, each] for key, each in encoded.items()]}


_RESERVED = {_TENSOR, _ITEMS, _NUMBER}


def decode(value: Any, tensor_of: Callable[[str], Any] = str) -> Any:
    """Return the value that `encode` was given, with lists in the places of tuples.

    Args:
        value: JSON value.
        tensor_of: Function of the name of a tensor that returns it; by default, the name itself.
    """
    if isinstance(value, list):
        return [decode(each, tensor_of) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensor_of(value[_TENSOR])
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    if value.keys() == {_ITEMS}:
        return {key: decode(each, tensor_of) for key, each in value[_ITEMS]}
    return {key: decode(each, tensor_of) for key, each in value.items()}


def has_tensors(value: Any) -> bool:
    """Return True if a JSON value of a checkpoint has names of tensors."""
    if isinstance(value, dict):
        return value.keys() == {_TENSOR} or any(map(has_tensors, value.values()))
    return isinstance(value, list) and any(map(has_tensors, value))


def is_value(value: Any) -> bool:
    """Return True if a value has JSON types and tensors only."""
    if isinstance(value, Mapping):
        return all(map(is_value, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_value, value))
    return isinstance(value, (*_SCALARS, Tensor))
