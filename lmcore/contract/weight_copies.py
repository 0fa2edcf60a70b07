"""Copies of weights in the dtype of products, which the optimizer writes with the weights.

Under autocast every micro-batch casts every weight, which reads all of them.  A kernel of `adamw`
that takes `copies` writes the narrow weight where it has the wide one in a register, and kernels of
products read it by `narrow_weight`.  A copy is equal to the cast, bit for bit.

A copy is used from the end of the step that wrote it until anything else may have changed weights:
`forget_copies`, or another version or other memory of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["copies_of", "forget_copies", "keep_copies", "narrow_weight", "use_copies"]


@dataclass
class _Copy:
    """The copy of a weight.

    Attributes:
        narrow: The copy, or memory for it; None before a kernel asked for the weight.
        state: Version and address of the weight that it is equal to; None: of none.
    """

    dtype: torch.dtype
    narrow: Tensor | None = None
    state: tuple[int, int] | None = None


_copies: MutableMapping[Tensor, _Copy] = WeakIdKeyDictionary()


def keep_copies(weights: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Keep a copy of each of *weights* that a kernel asks for.

    Args:
        weights: Weights that one optimizer changes, and nothing else; it calls `use_copies` after
            each change.
        dtype: Dtype of the copies.
    """
    for weight in weights:
        _copies[weight] = _Copy(dtype)


def narrow_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, without a gradient: its copy where that is current, or a cast.

    Args:
        weight: The weight, as the module has it: a view of it has no copy.
        dtype: Dtype of products.
    """
    kept = _copies.get(weight)
    if kept is None or kept.dtype != dtype:
        return weight.detach().to(dtype)
    if kept.narrow is None or kept.state != _state(weight):
        # Other memory: the graph of an earlier forward pass may still read the old copy.
        kept.narrow, kept.state = weight.detach().to(dtype), None
    return kept.narrow


def copies_of(weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the memory of each weight's copy, for a kernel to write; None where none is wanted."""
    found = [_copies.get(weight) for weight in weights]
    return [None if kept is None else kept.narrow for kept in found]


def use_copies(weights: Iterable[Tensor]) -> None:
    """Have the copies used from now on: all that `copies_of` returned have been written."""
    for weight in weights:
        kept = _copies.get(weight)
        if kept is not None and kept.narrow is not None:
            kept.state = _state(weight)


def forget_copies(weights: Iterable[Tensor]) -> None:
    """Have no copy used until the next step: the weights may have changed in any way."""
    for weight in weights:
        kept = _copies.get(weight)
        if kept is not None:
            kept.state = None


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()  # noqa: SLF001 - torch has no public name for it
