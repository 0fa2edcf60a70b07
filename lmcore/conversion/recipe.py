"""`Recipe`: rule that joins tensors of another format to one of lmcore, and splits it again.

lmcore packs projections along their output dim: queries, keys and values as [q; k; v], the two
projections of a SwiGLU layer as [gate; up].  Each foreign order is one recipe, which applies to a
weight, to its bias, and to the optimizer's state of either.

Shapes: H hidden, N query heads, K heads of keys and values, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Recipe", "grouped_qkv", "same", "stacked", "transposed"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """Rule for one tensor of lmcore.

    Attributes:
        sources: Shapes of the foreign tensors, by name, in the order of `join` and `split`.
        join: Function that returns the tensor of lmcore from the foreign tensors.
        split: Function that returns the foreign tensors from the tensor of lmcore.
    """

    sources: Mapping[str, Shape]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


def same(name: str, shape: Shape) -> Recipe:
    """Return the recipe of a tensor that is the same in the other format.

    Args:
        name: Name in the other format.
        shape: Shape of the tensor.
    """
    return Recipe({name: shape}, lambda parts: parts[0], lambda tensor: [tensor])


def transposed(name: str, shape: Shape) -> Recipe:
    """Return the recipe of a matrix that the other format has transposed; vectors are equal.

    Args:
        name: Name in the other format.
        shape: Shape of the tensor of lmcore, one or two dims.
    """
    return Recipe({name: shape[::-1]}, lambda parts: parts[0].t(), lambda tensor: [tensor.t()])


def stacked(names: Sequence[str], rows: Sequence[int], shape: Shape) -> Recipe:
    """Return the recipe of a tensor that the other format has as several, along the first dim.

    Args:
        names: Names in the other format, in lmcore's order.
        rows: Size of each along the first dim.
        shape: Shape of the tensor of lmcore.
    """
    assert sum(rows) == shape[0], f"{rows} rows do not make {shape}"
    return Recipe(
        {name: (count, *shape[1:]) for name, count in zip(names, rows, strict=True)},
        lambda parts: torch.cat(list(parts)),
        lambda tensor: tensor.split(list(rows)),
    )


def grouped_qkv(name: str, shape: Shape, *, groups: int, queries: int, channels: int) -> Recipe:
    """Return the recipe of packed queries, keys and values in Megatron's order.

    Megatron packs them by head of keys and values: the query heads that share it, then its keys,
    then its values; [K, (N/K + 2) D, ...].

    Args:
        name: Name in the other format.
        shape: Shape of the tensor of lmcore, [(N + 2K) D, ...].
        groups: Heads of keys and values, K.
        queries: Query heads of each, N/K; 0: there are keys and values alone.
        channels: Channels of a head, D.
    """
    rest = shape[1:]

    def join(parts: Sequence[Tensor]) -> Tensor:
        by_group = parts[0].reshape(groups, queries + 2, channels, *rest)
        heads = by_group.split([queries, 1, 1], dim=1)
        return torch.cat([part.reshape(-1, *rest) for part in heads])

    def split(tensor: Tensor) -> Sequence[Tensor]:
        size = groups * channels
        parts = tensor.split([queries * size, size, size])
        by_group = [part.reshape(groups, -1, channels, *rest) for part in parts]
        return [torch.cat(by_group, dim=1).reshape(shape)]

    return Recipe({name: shape}, join, split)
