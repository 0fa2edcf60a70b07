"""Passes over all samples, each in a different order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmcore.data.blend.cyclic_sampler import CyclicDataset
from lmcore.data.loading.loader import BatchLoader


class Numbers:
    """Ten samples, each its own number."""

    order = "numbers"

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return np.array([i, i], dtype=np.int64)


def read(dataset, **arguments):
    with BatchLoader(dataset, **arguments) as loader:
        return [int(one) for batch in loader for one in batch["tokens_BS"].flatten()]


def test_passes():
    """Each pass has every sample once, in torch's permutation for the pass's number."""
    cyclic = CyclicDataset(Numbers(), 35)
    found = [int(cyclic[i][0]) for i in range(35)]
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        expected = torch.randperm(10, generator=generator).tolist()
        assert found[10 * number : 10 * number + 10] == expected
    assert len({tuple(found[at : at + 10]) for at in (0, 10, 20)}) == 3
    with pytest.raises(IndexError):
        cyclic[35]
    with pytest.raises(IndexError):
        cyclic[-1]


@pytest.mark.parametrize("consumed", [0, 4, 10, 12, 28])
def test_resumed_run_sees_what_an_unbroken_one_sees(consumed):
    """From any position on, also from the middle of a later pass, the samples are the same."""
    whole = read(CyclicDataset(Numbers(), 36), micro_batch_size=2)
    rest = read(CyclicDataset(Numbers(), 36), micro_batch_size=2, consumed_samples=consumed)
    assert rest == whole[consumed:]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_order_does_not_depend_on_the_number_of_processes(size):
    """A global batch of six holds the same samples for one process or six."""
    batches = [
        read(
            CyclicDataset(Numbers(), 36),
            micro_batch_size=6 // size,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        for rank in range(size)
    ]
    each = 6 // size
    together = [
        sample
        for step in range(6)
        for one in batches
        for sample in one[step * each : (step + 1) * each]
    ]
    assert together == read(CyclicDataset(Numbers(), 36), micro_batch_size=6)


def test_order_is_the_dataset_s():
    """A shorter or longer run has the same order, a plain one another."""
    assert CyclicDataset(Numbers(), 5).order == CyclicDataset(Numbers(), 50).order != Numbers.order
