"""Tests of files that are cut short while they are memory-mapped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed import mapped_files
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.loading.loader import BatchLoader


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
    assert f"{size:,} bytes" in str(caught.value.why)


def test_a_cut_within_the_last_page_is_an_error(samples: GPTDataset, tmp_path: Path):
    """The rest of that page would read as zeros."""
    path = tmp_path / "text.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match=r"text\.bin` was cut short"):
        samples[0]


@pytest.fixture
def cut_at_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Cut a file when the next guarded read has begun, after any comparison of sizes."""
    guard = native.mapping_guard
    if guard is None:
        pytest.skip("needs the C++ parts")

    def arm(path: Path) -> None:
        class Cutting:
            def begin_read(self) -> None:
                guard.begin_read()
                os.truncate(path, 10)

            def __getattr__(self, name: str) -> Any:
                return getattr(guard, name)

        monkeypatch.setattr(mapped_files, "mapping_guard", Cutting())

    return arm


@pytest.mark.parametrize(
    "pattern", ["text.bin", "text.idx", "*document_index.npy", "*shuffle_index.npy"]
)
def test_a_file_cut_during_a_read_is_an_error(
    samples: GPTDataset, tmp_path: Path, pattern: str, cut_at_read: Callable[[Path], None]
):
    """The bus error of the read is caught, and other samples are refused as well."""
    (path,) = tmp_path.rglob(pattern)
    content = path.read_bytes()
    cut_at_read(path)
    with pytest.raises(DataError, match="was cut short") as caught:
        samples[1999]
    assert str(path) in caught.value.what
    path.write_bytes(content)  # in place: the map has zeros now
    with pytest.raises(DataError, match=r"could not be read|was cut short"):
        samples[1999]


def test_a_file_cut_while_its_index_is_built(
    samples: GPTDataset, tmp_path: Path, cut_at_read: Callable[[Path], None]
):
    """The compiled code reads the sizes for seconds; nothing of it is stored."""
    indexed = IndexedDataset(tmp_path / "text")
    cut_at_read(tmp_path / "text.idx")
    with pytest.raises(DataError, match=r"text\.idx` was cut short"):
        GPTDataset(indexed, document_range=(0, 400), num_samples=2000, sequence_length=64, seed=2)


READ, SIGNAL = "print(other[-1])", "os.kill(os.getpid(), signal.SIGBUS)"


@pytest.mark.parametrize("handler, act", [("pass", READ), ("pass", SIGNAL), ("enable()", READ)])
def test_other_bus_errors_end_the_process(
    samples: GPTDataset, tmp_path: Path, handler: str, act: str
):
    """Reads of maps that are not guarded, and signals of other processes, act as before."""
    other = tmp_path / "other"
    other.write_bytes(bytes(100_000))
    script = f"""
import os, signal, numpy
from faulthandler import enable
{handler}
from lmcore.data.indexed.dataset import IndexedDataset
indexed = IndexedDataset({str(tmp_path / "text")!r})
other = numpy.memmap({str(other)!r}, dtype="u1", mode="r")
os.truncate({str(other)!r}, 10)
with indexed.reading("a sample"):
    {act}
print("went on")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGBUS
    assert "went on" not in ended.stdout
    assert ("Fatal Python error: Bus error" in ended.stderr) == (handler == "enable()")
