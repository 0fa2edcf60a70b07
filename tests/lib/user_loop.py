"""Model, batches, samplers and a dataset of a user's loop, for tests of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model with dropout, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


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
