"""Tests of files that are cut short while they are memory-mapped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.loading.loader import BatchLoader
from lmcore.errors import DataError


@pytest.fixture
def samples(tmp_path: Path) -> GPTDataset:
    """Samples of a dataset of many pages, whose index is memory-mapped, too."""
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for number in range(400):
            writer.add_document(np.full(100, number, np.uint16))

    def opened() -> GPTDataset:
        return GPTDataset(
            IndexedDataset(tmp_path / "text"),
            document_range=(0, 400),
            num_samples=2000,
            sequence_length=64,
            seed=1,
        )

    opened()
    return opened()


@pytest.mark.parametrize(
    "pattern", ["text.bin", "text.idx", "*sample_index.npy", "*shuffle_index.npy"]
)
def test_a_file_cut_short_is_an_error(samples: GPTDataset, tmp_path: Path, pattern: str):
    """In the loading thread, with path, sample and sizes; a read of the map would be SIGBUS."""
    (path,) = tmp_path.rglob(pattern)
    size = path.stat().st_size
    with BatchLoader(samples, micro_batch_size=2, prefetch=1) as batches:
        next(batches)
        os.truncate(path, 10)
        with pytest.raises(DataError, match="was cut short") as caught:
            list(batches)
    assert str(path) in caught.value.what
    assert str(caught.value.why).startswith("sample ")
    assert f"{size} bytes" in str(caught.value.why)


def test_a_cut_within_the_last_page_is_an_error(samples: GPTDataset, tmp_path: Path):
    """The rest of that page would read as zeros."""
    path = tmp_path / "text.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=r"text\.bin` was cut short"):
        samples[0]
