"""Tensors in containers: each tensor is mapped, containers keep their types, the rest stays."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lmcore.data.loading.nested import map_tensors, to_device


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    name: str = "a name"


@dataclass
class Derived:
    x: Tensor
    built: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.built += 1


class Encoding(UserDict):  # type: ignore[type-arg]
    """Dictionary as a tokenizer of `transformers` returns: with `to`, which changes itself."""

    def __init__(self, data: Any, encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Rows(list):  # type: ignore[type-arg]
    """List of a class of the user's own."""


X = torch.arange(3)
NESTED = {
    "tensor": X,
    "list": [X, 1, "text", None],
    "tuple": (X, (X, [X])),
    "namedtuple": Pair(X, [X, 2.5]),
    "dict": {"x": X, 3: {"y": X}},
    "OrderedDict": OrderedDict(b=X, a=1),
    "defaultdict": defaultdict(list, x=X),
    "UserDict": Encoding({"x": X}, "kept"),
    "list of a subclass": Rows([X, X]),
    "frozen slots": Slotted(X),
    "data class": Derived(X),
}


def flat(value: Any) -> list[Any]:
    """Return the values in *value*, tensors as lists, in order."""
    found: list[Any] = []
    if isinstance(value, Tensor):
        return [value.tolist()]
    if isinstance(value, dict | UserDict):
        value = [*value.items()]
    elif isinstance(value, Slotted):
        value = [value.x, value.name]
    elif hasattr(value, "__dict__") and not isinstance(value, list):
        value = [*vars(value).items()]
    if isinstance(value, list | tuple):
        for item in value:
            found += flat(item)
        return found
    return [value]


@pytest.mark.parametrize("name", NESTED)
def test_each_tensor_is_mapped(name: str) -> None:
    """The result has the type, the order and the other values of the given one, which stays."""
    given = NESTED[name]
    before = flat(given)
    found = map_tensors(given, lambda tensor: tensor + 10)
    assert type(found) is type(given)
    moved = [[x + 10 for x in item] if isinstance(item, list) else item for item in before]
    assert flat(found) == moved
    assert flat(given) == before
    if isinstance(given, Encoding):
        assert found.encodings == "kept"
    if isinstance(given, Derived):
        assert found.built == 1


@pytest.mark.parametrize("name", sorted(NESTED))
def test_nothing_is_copied_without_need(name: str) -> None:
    """A batch is the same object if all its tensors are on the device already."""
    assert to_device(NESTED[name], torch.device("cpu")) is NESTED[name]


def test_other_values_stay() -> None:
    """Classes, strings, sizes, sets and arrays are no containers of tensors."""
    for value in (
        Tensor,
        Derived,
        "text",
        b"bytes",
        torch.Size([2, 3]),
        {1, 2},
        range(3),
        None,
        X.numpy(),
    ):
        assert map_tensors(value, lambda tensor: tensor + 1) is value


def test_an_object_moves_itself() -> None:
    """A packed sequence, whose lengths belong to the host, is moved by its own `to`."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = to_device((packed, X), torch.device("meta"))
    assert found[0].data.device.type == found[1].device.type == "meta"
    assert found[0].batch_sizes.device.type == "cpu"
    assert map_tensors(packed, lambda tensor: tensor + 1) is packed
