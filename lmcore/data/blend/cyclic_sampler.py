"""Passes over all samples of a dataset, each shuffled anew: Megatron's cyclic sampler.

Position p belongs to pass p // N and to no process in particular: whatever the number of
data-parallel processes, and wherever a run was interrupted, position p is the same sample.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CyclicDataset", "Ordered"]


class Ordered(Protocol):
    """Samples that know a fingerprint of their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> npt.NDArray[np.int64]: ...

    @property
    def order(self) -> str:
        """The fingerprint."""


class CyclicDataset:
    """A dataset whose samples come in passes; each pass has a permutation of its own.

    The permutation of pass e is `torch.randperm` of a generator seeded with e, as upstream's for
    one process.

    Args:
        dataset: All of its samples make a pass.
        num_samples: Length of the whole.
    """

    def __init__(self, dataset: Ordered, num_samples: int) -> None:
        if len(dataset) < 1:
            raise ValueError("passes over no samples")
        self.dataset = dataset
        self._num_samples = num_samples
        self._pass = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of positions."""
        return self._num_samples

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        """Return the sample at position *i*.

        Raises:
            IndexError: No such position.
        """
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        return self.dataset[self.locate(i)]

    def locate(self, i: int) -> int:
        """Return which of the dataset's samples stands at position *i*."""
        number, place = divmod(i, len(self.dataset))
        if number != self._pass:
            import torch

            generator = torch.Generator().manual_seed(number)
            self._permutation = torch.randperm(len(self.dataset), generator=generator).numpy()
            self._pass = number
        return int(self._permutation[place])

    @property
    def order(self) -> str:
        """Fingerprint of the order in which samples come."""
        return f"cyclic:{len(self.dataset)}:{self.dataset.order}"
