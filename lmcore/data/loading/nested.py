"""Functions on the tensors of a batch, whatever containers it consists of."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "to_device"]

_LEAVES = frozenset({bool, bytes, complex, float, int, str, type(None)})


def map_tensors(
    value: Any,
    function: Callable[[Tensor], Tensor],
    on_object: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return *value* with *function* applied to each tensor in it.

    Lists, tuples, named tuples, dictionaries (subclasses and `UserDict`, as a tokenizer of
    `transformers` returns, too) and data classes are copied if a tensor in them changes; other
    values are left as they are.

    Args:
        value: A batch: tensors in containers, nested to any depth.
        function: Function of a tensor.
        on_object: Function of an object that is no such container and has a method `to`, such as
            a packed sequence.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return _map_items(value, function, on_object)
    if isinstance(value, dict | UserDict):
        return _map_dict(value, function, on_object)
    return _map_instance(value, function, on_object)


def to_device(value: Any, device: Any) -> Any:
    """Return *value* with its tensors on *device*; a tensor that is there is not copied.

    Args:
        value: A batch; see `map_tensors`.
        device: `torch.device`, with an index if the type has several.
    """
    return map_tensors(
        value,
        lambda tensor: tensor if tensor.device == device else tensor.to(device),
        lambda movable: movable.to(device),
    )


def _map_instance(
    value: Any, function: Callable[[Tensor], Tensor], on_object: Callable[[Any], Any]
) -> Any:
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return on_object(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, function, on_object)
    return _map_items(value, function, on_object) if isinstance(value, list | tuple) else value


def _map_items(
    value: Any, function: Callable[[Tensor], Tensor], on_object: Callable[[Any], Any]
) -> Any:
    items = [map_tensors(item, function, on_object) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    kind = type(value)
    if kind is list:
        return items
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _map_dict(
    value: Any, function: Callable[[Tensor], Tensor], on_object: Callable[[Any], Any]
) -> Any:
    mapped = {key: map_tensors(item, function, on_object) for key, item in value.items()}
    if all(map(operator.is_, mapped.values(), value.values())):
        return value
    if type(value) is dict:
        return mapped
    copied = copy.copy(value)
    for key, item in mapped.items():
        copied[key] = item
    return copied


def _map_dataclass(
    value: Any, function: Callable[[Tensor], Tensor], on_object: Callable[[Any], Any]
) -> Any:
    fields = vars(value) if hasattr(value, "__dict__") else _slots(value)
    mapped = {name: map_tensors(item, function, on_object) for name, item in fields.items()}
    changed = {name: item for name, item in mapped.items() if item is not fields[name]}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)  # the class may be frozen
    return copied


def _slots(value: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
