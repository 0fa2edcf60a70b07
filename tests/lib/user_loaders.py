"""Samplers, batches and a dataset of the user's own, for tests of the library's loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import TensorDataset


class Odd:
    """Sampler of the user's own: an order that no generator of torch decides."""

    def __init__(self, count: int = 9) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter([5, 1, 8, 3, 7, 0, 2, 6, 4][: self.count])

    def __len__(self) -> int:
        return self.count


class OddBatches(Odd):
    """Batches of different sizes."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([5], [1, 8, 3], torch.tensor([7, 0]), [2], (6, 4))

    def __len__(self) -> int:
        return 5


class Unsized:
    """Batches without a length, as a generator that can be begun again."""

    def __iter__(self) -> Iterator[Any]:
        return iter(numbers(9))


def numbers(count: int) -> list[Any]:
    return [torch.tensor([i]) for i in range(count)]


def dataset(count: int = 9) -> TensorDataset:
    return TensorDataset(torch.arange(count))
