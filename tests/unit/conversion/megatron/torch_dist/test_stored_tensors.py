"""Parts of stored chunks: the same values as torch's loader gives, and no other bytes read."""

from __future__ import annotations

import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import dcp_reader
from lmcore.checkpoint.dcp_metadata import ForeignIndex, read_foreign_metadata
from lmcore.checkpoint.strided_record import strided_record
from lmcore.conversion.megatron.torch_dist.stored_tensors import PartReader

# torch says that it saves in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # in torch 2.8 itself
]

TENSORS = {
    "vector": torch.arange(3000.0),
    "half": torch.arange(300).view(10, 5, 6).bfloat16(),
    "double": torch.rand(7, 3, dtype=torch.float64),
    "transposed": torch.rand(6, 4).t(),
    "number": torch.tensor(5.0),
    "integers": torch.arange(12).view(3, 4),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ForeignIndex]:
    """Tensors that torch saved, and their index."""
    directory = tmp_path_factory.mktemp("saved")
    dcp.save(dict(TENSORS), checkpoint_id=directory)
    return directory, read_foreign_metadata(directory)


def part(reader: PartReader, index: ForeignIndex, name: str, first: Any, size: Any) -> torch.Tensor:
    entry = index.tensors[name]
    return reader.read(index.chunks[name], entry.dtype, entry.shape, first, size)


@pytest.mark.parametrize("name", TENSORS)
def test_parts(name: str, index: tuple[Path, ForeignIndex]) -> None:
    """Whole tensors and random boxes of them, in any dtype and order of the elements."""
    directory, found = index
    reader, whole, dice = PartReader(directory), TENSORS[name], random.Random(3)
    shape = tuple(whole.shape)
    assert torch.equal(part(reader, found, name, (0,) * len(shape), shape), whole)
    for _ in range(10):
        first = tuple(dice.randrange(size) for size in shape)
        size = tuple(dice.randint(1, end - at) for at, end in zip(first, shape, strict=True))
        box = tuple(slice(at, at + count) for at, count in zip(first, size, strict=True))
        assert torch.equal(part(reader, found, name, first, size), whole[box])


def test_no_other_elements_are_read(
    index: tuple[Path, ForeignIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are compared once for each chunk, and torch's loader, which reads all, not used."""
    directory, found = index
    reader, compared = PartReader(directory), []
    check = dcp_reader.damaged_record
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", None)
        patch.setattr(dcp_reader, "damaged_record", lambda one: compared.append(one) or check(one))
        for first in range(0, 3000, 100):
            read = part(reader, found, "vector", (first,), (100,))
            assert torch.equal(read, TENSORS["vector"][first : first + 100])
        assert len(compared) == 1
        part(PartReader(directory, compare=False), found, "vector", (5,), (9,))
        assert len(compared) == 1


@pytest.mark.parametrize("kind", ["missing", "directory", "flipped", "cut", "pipe"])
def test_files_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    """The error names the file, whatever the damage."""
    dcp.save({"vector": TENSORS["vector"]}, checkpoint_id=tmp_path)
    found, reader = read_foreign_metadata(tmp_path), PartReader(tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "flipped":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError) as caught:
        part(reader, found, "vector", (0,), (1,))
    assert str(path) in f"{caught.value.what} {caught.value.why}"


def saved(content: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream


@pytest.mark.parametrize(
    "content",
    [
        torch.rand(4, 3)[:, 1],
        torch.rand(4, 3).t(),
        torch.ones(1).expand(4),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(3).to_sparse(),
        {"tensor": torch.rand(3)},
        [torch.rand(3)] * 2,
        torch.arange(3),
        None,
    ],
    ids=[
        *("column", "transposed", "expanded", "parameter", "sparse"),
        *("mapping", "list", "integers", "nothing"),
    ],
)
def test_what_is_left_to_torch(content: Any) -> None:
    """Anything but a contiguous tensor of floats has no position."""
    stream = saved(content)
    assert strided_record(stream, zipfile.ZipFile(stream)) is None


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 4, 1), (0, 3)], ids=str)
def test_positions(shape: tuple[int, ...]) -> None:
    """The bytes at the position are the tensor's, also of a view into a larger storage."""
    whole = torch.rand(40)
    count = torch.Size(shape).numel()
    view = whole[7 : 7 + count].view(shape)
    stream = saved(view)
    record = strided_record(stream, zipfile.ZipFile(stream))
    assert record is not None
    assert (record.dtype, record.itemsize, record.shape) == ("float32", 4, shape)
    held = stream.getvalue()[record.position : record.position + 4 * count]
    assert held == bytes(view.contiguous().reshape(-1).view(torch.uint8).tolist())
