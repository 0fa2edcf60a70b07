"""Tests of archives of tensors: their bytes are torch's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import get_crc32_options

from lmcore.checkpoint import dcp_writer
from lmcore.checkpoint.dcp_writer import torch_checksums, write_archive
from lmcore.checkpoint.files.synced_file import SyncedFile

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
]
SHAPES = [(), (1,), (3,), (63,), (64,), (65,), (5, 7), (300, 700), (2, 3, 4, 5), (0,), (4, 0)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def by_torch(tensors: list[torch.Tensor]) -> bytes:
    """Return the archives that torch writes, one after another."""
    content = io.BytesIO()
    for tensor in tensors:
        one = io.BytesIO()
        torch.save(tensor, one)
        content.write(one.getvalue())
    return content.getvalue()


def written(path: Path, tensors: list[torch.Tensor]) -> bytes:
    with SyncedFile(path) as stream:
        for tensor in tensors:
            write_archive(stream, tensor)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leave out torch's checksums, and begin without known kinds of tensors."""
    monkeypatch.setattr(dcp_writer, "_known", {})
    with torch_checksums(written=False, before=get_crc32_options()):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_torch(tmp_path: Path, dtype: torch.dtype):
    """Archives of every dtype and shape have torch's bytes, whatever the elements are."""
    tensors = [numbers(shape, dtype, seed) for seed in range(3) for shape in SHAPES]
    assert written(tmp_path / "file", tensors) == by_torch(tensors)


def test_torch_writes_one_tensor_of_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bytes around the elements are torch's, and kept for other tensors of the kind."""
    save, calls = torch.save, []
    monkeypatch.setattr(torch, "save", lambda *given: calls.append(1) or save(*given))
    written(tmp_path / "file", [numbers((40, 50), torch.float32, seed) for seed in range(5)])
    assert len(calls) == 1
    monkeypatch.setattr(dcp_writer, "_MOST_KINDS", 1)
    written(tmp_path / "other", [numbers((40, 51), torch.float32, seed) for seed in range(5)])
    assert len(calls) == 6
    assert len(dcp_writer._known) == 1


def test_other_tensors_are_left_to_torch(tmp_path: Path):
    """A tensor is written by torch if its archive has more than its elements."""
    conjugate = numbers((3, 4), torch.complex64, 1).conj()
    tensors = [
        conjugate,
        torch._neg_view(numbers((3, 4), torch.float32, 2)),
        torch.ones(4, requires_grad=True),
        torch.nn.Parameter(torch.ones(4)),
    ]
    assert written(tmp_path / "file", tensors) == by_torch(tensors)


def test_with_checksums(tmp_path: Path):
    """With torch's checksums, which depend on the elements, torch writes each tensor."""
    tensors = [numbers((40, 50), torch.float32, seed) for seed in range(2)]
    without = written(tmp_path / "without", tensors)
    assert len(dcp_writer._known) == 1
    with torch_checksums(written=True, before=get_crc32_options()):
        assert written(tmp_path / "with", tensors) == by_torch(tensors) != without
    assert written(tmp_path / "again", tensors) == without


def test_elements_in_several_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A version of torch that divides the elements, or copies them, still writes right archives."""
    monkeypatch.setattr(dcp_writer, "_address", lambda _piece: 0)
    tensors = [numbers((40, 50), torch.float32, seed) for seed in range(2)]
    assert written(tmp_path / "file", tensors) == by_torch(tensors)
    assert not dcp_writer._known


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A failed write is kept in the file, as it is when torch writes."""
    stream = SyncedFile(tmp_path / "file")

    def fail(_piece: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "_append", fail)
    write_archive(stream, torch.ones(40, 50))
    with pytest.raises(OSError, match="No space left"):
        stream.check()
    with pytest.raises(OSError, match="No space left"):
        stream.close()
