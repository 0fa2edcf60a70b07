"""Cyclic sampler: passes over all samples of a dataset, each in its own random order.

Position p of N samples belongs to pass p // N.  It is the same sample for any number of
data-parallel ranks, and after a resume.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CyclicDataset", "OrderedSamples"]


class OrderedSamples(Protocol):
    """Samples with a fingerprint of their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""


class CyclicDataset:
    """Dataset of several passes over another one; each pass has its own permutation.

    Args:
        dataset: Samples of one pass, at least one.
        num_samples: Length of the cyclic dataset.

    Source:
        Megatron-LM, `MegatronPretrainingRandomSampler` (`--dataloader-type cyclic`) on one
        process: the permutation of pass e is `torch.randperm` of a generator seeded with e.
    """

    def __init__(self, dataset: OrderedSamples, num_samples: int) -> None:
        if len(dataset) < 1:
            raise ValueError("the dataset has no samples")
        self.dataset = dataset
        self._num_samples = num_samples
        self._pass = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of positions."""
        return self._num_samples

    def __getitem__(self, i: int) -> Any:
        """Return the sample at position *i*.

        Raises:
            IndexError: *i* is not in 0 to `len(self) - 1`.
        """
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        return self.dataset[self.locate(i)]

    def locate(self, i: int) -> int:
        """Return the number of the dataset's sample at position *i*."""
        number, position = divmod(i, len(self.dataset))
        if number != self._pass:
            import torch

            generator = torch.Generator().manual_seed(number)
            self._permutation = torch.randperm(len(self.dataset), generator=generator).numpy()
            self._pass = number
        return int(self._permutation[position])

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""
        return f"cyclic:{len(self.dataset)}:{self.dataset.order}"
