"""Reads tensors in torch's distributed checkpoint format, from an index that was checked first."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import CheckpointError
from lmcore.base.threads import map_in_threads
from lmcore.checkpoint.chunks import ChunkBounds, overlap
from lmcore.checkpoint.dcp_metadata import StoredChunk, StoredObject
from lmcore.checkpoint.manifest import TensorEntry
from lmcore.checkpoint.strided_record import StridedRecord, strided_record
from lmcore.checkpoint.zip_checksum import damaged_record
from lmcore.contract.dtype import dtype_name
from lmcore.parallel.tensor_layout import TensorLayout, box

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Copy",
    "copies_of",
    "not_as_stated",
    "opened",
    "opened_record",
    "read_chunk",
    "read_object",
    "read_rows",
    "read_tensors",
    "refuse_compressed",
    "slice_of",
]

_MAX_OBJECT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Copy:
    """A part of a stored chunk, and where it belongs.

    Attributes:
        start: Index of its first element in the chunk.
        target: View to copy it to.
    """

    start: tuple[int, ...]
    target: Tensor


def read_tensors(
    directory: Path,
    index: Mapping[str, Sequence[StoredChunk]],
    entries: Mapping[str, TensorEntry],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    num_threads: int,
) -> None:
    """Fill *tensors* in place from *directory*; chunks without elements of them are not read.

    Args:
        directory: Directory of the checkpoint.
        index: Checked index of the checkpoint.
        entries: Dtype and shape of each tensor, from the manifest.
        tensors: Local tensors to fill, as far as they are in the checkpoint.
        layouts: Layouts of the local tensors by name; a tensor without one is whole.
        num_threads: Number of files that are read at the same time.

    Raises:
        CheckpointError: Stored bytes are not the tensor in the index, or a file cannot be read.
    """
    files: dict[str, dict[StoredChunk, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in tensors.items():
        layout = layouts.get(name) or TensorLayout.whole(tuple(tensor.shape))
        for chunk in index[name]:
            for copy in copies_of(chunk, tensor.detach(), layout):
                files[chunk.file][chunk].append(copy)
    map_in_threads(
        lambda item: _read_file(directory / item[0], item[1], entries),
        files.items(),
        num_threads,
    )


def read_object(directory: Path, name: str, stored: StoredObject, *, large: bool = False) -> Any:
    """Return an object of plain values and tensors, which names no code.

    Args:
        directory: Directory of the checkpoint.
        name: Name of the object, for messages.
        stored: Its position.
        large: True for an object that may be of any size, within its file.

    Raises:
        CheckpointError: It is damaged, too large, or contains anything else.
    """
    path = directory / stored.file
    why = ""
    try:
        with opened(path) as stream:
            part = slice_of(stream, stored.offset, stored.length)
            with zipfile.ZipFile(part) as archive:
                size = sum(one.file_size for one in archive.infolist())
                record = damaged_record(archive)
            part.seek(0)
            most = stored.length if large else _MAX_OBJECT_BYTES
            if max(size, stored.length) > most or size > stored.length:
                why = f"it is compressed or too large: {stored.length:,} bytes of {size:,}"
            elif record is not None:
                why = f"the checksum of its record `{record}` is wrong"
            else:
                return torch.load(part, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file fails in many ways
        # torch's own text suggests loading without the restriction: never show it.
        why = f"it is damaged, or has more than plain values: `{type(error).__name__}`"
    raise CheckpointError(f"`{name}` in `{path}` is refused", why=why, hint="copy the file again")


def copies_of(chunk: StoredChunk, tensor: Tensor, layout: TensorLayout) -> Iterator[Copy]:
    """Yield the parts of a stored chunk that a local tensor has.

    Args:
        chunk: Stored chunk.
        tensor: Local tensor.
        layout: Its layout.
    """
    for held in layout.chunks:
        shared = overlap(chunk.bounds, ChunkBounds(held.offset, held.size))
        if shared is None:
            continue
        offsets = zip(shared.offset, held.offset, held.start, strict=True)
        first = tuple(at - offset + start for at, offset, start in offsets)
        start = (at - low for at, low in zip(shared.offset, chunk.bounds.offset, strict=True))
        yield Copy(tuple(start), box(tensor, first, shared.size))


def _read_file(
    path: Path, reads: Mapping[StoredChunk, Sequence[Copy]], entries: Mapping[str, TensorEntry]
) -> None:
    with opened(path) as stream:
        for chunk, copies in sorted(reads.items(), key=lambda read: read[0].offset):
            dtype = entries[chunk.name].dtype
            left = _read_in_place(stream, path, chunk, copies, dtype)
            if left:
                _fill(left, read_chunk(stream, path, chunk, dtype))


def _read_in_place(
    stream: BinaryIO, path: Path, chunk: StoredChunk, copies: Sequence[Copy], dtype: str
) -> list[Copy]:
    """Read whole rows of a chunk from the file into their tensors; return the other copies.

    torch's loader would read the chunk into new memory, from which it would be copied.
    """
    if not any(_is_rows(copy, chunk) for copy in copies):
        return list(copies)
    record = opened_record(stream, path, chunk)
    if record is None or (record.dtype, record.shape) != (dtype, chunk.bounds.size):
        return list(copies)  # torch's loader reads it, or says what is wrong
    left = []
    for copy in copies:
        if _is_rows(copy, chunk):
            read_rows(stream, path, chunk, record, copy.start[0], copy.target)
        else:
            left.append(copy)
    return left


def _is_rows(copy: Copy, chunk: StoredChunk) -> bool:
    """Return True if the target of *copy* is rows of *chunk* in host memory, one after another."""
    target, size = copy.target, chunk.bounds.size
    return (
        target.device.type == "cpu"
        and target.dim() > 0
        and target.shape[1:] == size[1:]
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def opened_record(
    stream: BinaryIO, path: Path, chunk: StoredChunk, *, compare: bool = False
) -> StridedRecord | None:
    """Return where the elements of a chunk are; None if it is not a plain, contiguous tensor.

    Args:
        stream: Open file.
        path: Its path, for messages.
        chunk: Position of the chunk.
        compare: True to compare torch's checksums of the chunk.

    Raises:
        CheckpointError: The archive is compressed or damaged.
    """
    part = slice_of(stream, chunk.offset, chunk.length)
    try:
        refuse_compressed(part, path, chunk)
        with zipfile.ZipFile(part) as archive:
            damaged = damaged_record(archive) if compare else None
            found = None if damaged else strided_record(part, archive)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        why = f"reading it failed: `{type(error).__name__}`"
        raise not_as_stated(chunk, path, why) from error
    if damaged is not None:
        raise not_as_stated(chunk, path, f"the checksum of its record `{damaged}` is wrong")
    return found


def read_rows(
    stream: BinaryIO,
    path: Path,
    chunk: StoredChunk,
    record: StridedRecord,
    first: int,
    rows: Tensor,
) -> None:
    """Fill *rows* from the file.

    Args:
        stream: Open file.
        path: Its path, for messages.
        chunk: Position of the chunk.
        record: Position of its elements in it.
        first: First row to read.
        rows: Contiguous tensor on the host, of the record's dtype and size of rows.

    Raises:
        CheckpointError: The file ends before.
    """
    row_bytes = math.prod(record.shape[1:]) * record.itemsize
    content = rows.reshape(-1).view(torch.uint8).numpy().data
    stream.seek(chunk.offset + record.position + first * row_bytes)
    if stream.readinto(content) != len(content):  # type: ignore[attr-defined]
        raise not_as_stated(chunk, path, "it is truncated")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint for reading.

    Raises:
        CheckpointError: It is no regular file, or the file system refuses, also later on.
    """
    try:
        with open(open_regular(path), "rb") as stream:  # noqa: PTH123 - a descriptor
            yield stream
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{path}`", why=why) from error


def _fill(copies: Sequence[Copy], stored: Tensor) -> None:
    # A separate function, to free the memory of a chunk before the next chunk is read.
    for copy in copies:
        copy.target.copy_(box(stored, copy.start, tuple(copy.target.shape)))


def read_chunk(stream: BinaryIO, path: Path, chunk: StoredChunk, dtype: str) -> Tensor:
    """Return a stored chunk, whole.

    Args:
        stream: Open file.
        path: Its path, for messages.
        chunk: Position of the chunk.
        dtype: Dtype of the tensor in the index.

    Raises:
        CheckpointError: Stored bytes are not the tensor in the index.
    """
    part = slice_of(stream, chunk.offset, chunk.length)
    try:
        refuse_compressed(part, path, chunk)
        # Restricted to plain data: nothing in the file can name code to run.
        stored = torch.load(part, map_location="cpu", weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        # torch's own text suggests loading without the restriction: never show it.
        raise not_as_stated(chunk, path, f"reading it failed: `{type(error).__name__}`") from error
    if type(stored) is not torch.Tensor or stored.layout != torch.strided:
        raise not_as_stated(chunk, path, "it is not a plain tensor")
    if dtype_name(stored.dtype) != dtype:
        raise not_as_stated(chunk, path, f"its dtype is `{stored.dtype}`")
    if tuple(stored.shape) != chunk.bounds.size:
        raise not_as_stated(chunk, path, f"its shape is {list(stored.shape)}")
    return stored


def refuse_compressed(part: IO[bytes], path: Path, chunk: StoredChunk) -> None:
    """Raise a `CheckpointError` for a compressed chunk, which may be far larger in memory.

    Args:
        part: Archive of the chunk, at whose beginning it is afterwards.
        path: Path of the file.
        chunk: Stored chunk.
    """
    with zipfile.ZipFile(part) as archive:
        size = sum(one.file_size for one in archive.infolist())
    if size > chunk.length:
        why = f"it is compressed, {chunk.length:,} bytes of {size:,}, as no save does"
        raise not_as_stated(chunk, path, why)
    part.seek(0)


def slice_of(stream: BinaryIO, offset: int, length: int) -> IO[bytes]:
    """Return a byte range of a file, as a file.

    Args:
        stream: Open file.
        offset: First byte.
        length: Number of bytes.
    """
    return cast("IO[bytes]", _Slice(stream, offset, length))


class _Slice(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length = stream, offset, length
        self._stream.seek(offset)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        return self._stream.seek(self._offset + base + offset) - self._offset

    def tell(self) -> int:
        return self._stream.tell() - self._offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        room = max(0, self._length - self.tell())
        return self._stream.read(room if size < 0 else min(size, room))

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        room = max(0, self._length - self.tell())
        return self._stream.readinto(view[:room])  # type: ignore[attr-defined, no-any-return]


def not_as_stated(chunk: StoredChunk, path: Path, why: str) -> CheckpointError:
    """Return the error for a chunk whose bytes are not the tensor in the index.

    Args:
        chunk: Stored chunk.
        path: Path of its file.
        why: Difference.
    """
    return CheckpointError(
        f"tensor `{chunk.name}` is not stored as the checkpoint says",
        why=f"`{path}`: {why}",
        hint="use an earlier checkpoint, or restore this one from a copy",
    )
