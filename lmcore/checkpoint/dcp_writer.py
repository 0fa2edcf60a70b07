"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete without an error) and has no checksums; its planner exchanges objects by collectives,
which a thread beside training must not call.  The files are the same, so that any tool for the
format reads them.

torch writes the archive of a tensor in about 40 small pieces, through Python, which takes 0.2 to
0.6 ms: most of the time that Python takes in a save.  `write_archive` writes it in three: all bytes
but the tensor's own depend on its dtype and shape alone, if torch's checksums are left out, so that
they are kept for the next tensor of this kind.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lmcore.base.threads import map_in_threads
from lmcore.checkpoint.files.synced_file import SyncedFile
from lmcore.checkpoint.manifest import FileEntry, TensorEntry
from lmcore.checkpoint.write_plan import num_bytes
from lmcore.contract.dtype import dtype_name
from lmcore.parallel.tensor_layout import Chunk, box

__all__ = [
    "ByteRange",
    "Written",
    "torch_checksums",
    "write_archive",
    "write_chunks",
    "write_streamed",
]

_MOST_KINDS = 4096


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file in which a chunk is stored."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Written:
    """Synced files of a rank, and the byte range of each of its chunks."""

    files: Mapping[str, FileEntry]
    ranges: Sequence[ByteRange]


def write_chunks(
    directory: Path, chunks: Sequence[torch.Tensor], *, rank: int, num_threads: int
) -> Written:
    """Write *chunks* into *directory*, one file a thread, and sync them.

    Args:
        directory: Directory without files of this rank.
        chunks: Contents of the chunks, on any device.
        rank: Rank of this process, which is part of the files' names.
        num_threads: Largest number of threads, and of files.

    Raises:
        OSError: A write failed; the files are then incomplete.
    """
    groups = [group for group in _balance(chunks, num_threads) if group]
    names = [f"__{rank}_{number}.distcp" for number in range(len(groups))]
    checksums = get_crc32_options()

    def write_file(file: tuple[str, Sequence[int]]) -> tuple[FileEntry, list[ByteRange]]:
        with torch_checksums(written=False, before=checksums):
            return _write_file(directory / file[0], [chunks[number] for number in file[1]])

    written = map_in_threads(write_file, list(zip(names, groups, strict=True)), len(groups))
    files: dict[str, FileEntry] = {}
    ranges: dict[int, ByteRange] = {}
    for name, group, (entry, own) in zip(names, groups, written, strict=True):
        files[name] = entry
        ranges.update(zip(group, own, strict=True))
    return Written(files, [ranges[number] for number in range(len(chunks))])


def write_streamed(
    directory: Path,
    chunks: Mapping[str, tuple[str, Chunk]],
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], torch.Tensor],
    *,
    checksums: bool,
    num_threads: int = 1,
) -> Written:
    """Write tensors that are read one at a time into *directory*, one file a thread, and sync them.

    A thread reads while the others write, so that as many tensors as threads are in memory.

    Args:
        directory: Directory without files of rank 0.
        chunks: Tensor name and chunk of the whole tensor, by key.
        entries: Dtype and shape of each tensor, by name, about in the order of reading.
        read: Returns the whole tensor with a name, on any device; called by one thread at a time.
        checksums: True to write torch's checksums, for a checkpoint without others.
        num_threads: Largest number of threads, and of files.

    Raises:
        OSError: A write failed; the files are then incomplete.
        ValueError: A tensor is not as its entry says (a bug).
    """
    of_tensor: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for key, (name, chunk) in chunks.items():
        of_tensor[name].append((key, chunk))
    files: dict[str, FileEntry] = {}
    ranges: dict[str, ByteRange] = {}
    reading, failed, before = threading.Lock(), threading.Event(), get_crc32_options()

    def write(stream: SyncedFile, name: str) -> None:
        # A function of its own: its tensor is freed before the next is read.
        with reading:
            tensor = read(name)
        found = TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape))
        if found != entries[name]:
            raise ValueError(f"`{name}` is {found}, not {entries[name]}")
        for key, chunk in of_tensor[name]:
            ranges[key] = _write_chunk(stream, box(tensor, chunk.start, chunk.size))

    def write_file(item: tuple[int, Sequence[str]]) -> None:
        number, names = item
        try:
            with (
                torch_checksums(written=checksums, before=before),
                SyncedFile(directory / f"__0_{number}.distcp") as stream,
            ):
                for name in names:
                    if failed.is_set():
                        return
                    write(stream, name)
            files[stream.path.name] = stream.entry()
        except BaseException:
            failed.set()
            raise

    groups = _in_order(entries, num_threads)
    map_in_threads(write_file, list(enumerate(groups)), len(groups))
    return Written(files, [ranges[key] for key in chunks])


def _in_order(entries: Mapping[str, TensorEntry], count: int) -> list[list[str]]:
    """Divide tensors into groups of about as many bytes, each in the order of *entries*."""
    groups: list[list[str]] = [[] for _ in range(max(1, min(count, len(entries))))]
    loads = [(0, number) for number in range(len(groups))]
    for name, entry in entries.items():
        load, number = heapq.heappop(loads)
        groups[number].append(name)
        heapq.heappush(loads, (load + num_bytes(entry), number))
    return groups


def _write_file(path: Path, chunks: Sequence[torch.Tensor]) -> tuple[FileEntry, list[ByteRange]]:
    with SyncedFile(path) as stream:
        ranges = [_write_chunk(stream, chunk) for chunk in chunks]
    return stream.entry(), ranges


def _write_chunk(stream: SyncedFile, chunk: torch.Tensor) -> ByteRange:
    start = stream.tell()
    write_archive(stream, _on_host(chunk))
    stream.check()
    return ByteRange(stream.path.name, start, stream.tell() - start)


def _on_host(data: torch.Tensor) -> torch.Tensor:
    tensor = data.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.nbytes:
        return tensor.clone()
    # A view would be written with all of its storage; this storage is the view's memory alone.
    own = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return own.view(tensor.dtype).view(tensor.shape)


def _balance(chunks: Sequence[torch.Tensor], count: int) -> list[list[int]]:
    """Divide the numbers of chunks into groups of about as many bytes, for the threads."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for chunk in sorted(range(len(chunks)), key=lambda one: chunks[one].nbytes, reverse=True):
        load, number = heapq.heappop(loads)
        groups[number].append(chunk)
        heapq.heappush(loads, (load + chunks[chunk].nbytes, number))
    return groups


def write_archive(stream: SyncedFile, tensor: torch.Tensor) -> None:
    """Append the archive of a tensor, with torch's checksums if these are set (`torch_checksums`).

    Args:
        stream: File; a failed write is kept in it.
        tensor: Contiguous tensor on the host, whose storage is its own memory alone.
    """
    # A checksum depends on the elements.
    around = _bytes_around(tensor) if not get_crc32_options() and _is_plain(tensor) else None
    if around is None:
        torch.save(tensor, cast("IO[bytes]", stream))
        return
    stream.write(around.before)
    stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
    stream.write(around.after)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the archive records dtype, shape and elements only."""
    return (
        type(tensor) is torch.Tensor
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


class _Around(NamedTuple):
    """Bytes of an archive before and after the elements."""

    before: bytes
    after: bytes


_known: dict[tuple[torch.dtype, torch.Size], _Around] = {}
"""The bytes by dtype and shape, the first `_MOST_KINDS` of this process."""


def _bytes_around(tensor: torch.Tensor) -> _Around | None:
    """Return the bytes around the elements of such a tensor.

    None if torch does not write the elements in one piece.
    """
    kind = (tensor.dtype, tensor.shape)
    if (known := _known.get(kind)) is not None:
        return known
    like = torch.empty(tensor.shape, dtype=tensor.dtype)  # never filled: it takes no memory
    record = _Record(like)
    torch.save(like, cast("IO[bytes]", record))
    # Asked again: another thread may have changed a setting that is one for all.
    if get_crc32_options() or len(record.parts) != 2:
        return None
    found = _Around(*(b"".join(part) for part in record.parts))
    if len(_known) < _MOST_KINDS:
        _known[kind] = found
    return found


class _Record:
    """A file that keeps what is written, but for the elements of a tensor.

    Attributes:
        parts: Pieces before and after the elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.parts: list[list[bytes]] = [[]]
        self._address, self._size = tensor.data_ptr(), tensor.nbytes
        self._position = 0

    def write(self, content: bytes | memoryview) -> int:
        """Keep a piece."""
        piece = memoryview(content).cast("B")
        if len(piece) == self._size and _address(piece) == self._address:
            self.parts.append([])
        else:
            self.parts[-1].append(bytes(piece))
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._position

    def flush(self) -> None:
        """Do nothing."""


def _address(piece: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(piece, np.uint8).ctypes.data)


@contextmanager
def torch_checksums(*, written: bool, before: bool) -> Iterator[None]:
    """Write, or leave out, the checksums that torch computes and never compares.

    They take most of the processor time of a save, which a training step may need; a checkpoint
    with a manifest has its own.

    Args:
        written: True to write them.
        before: Setting to restore; some versions of torch have one for all threads.
    """
    set_crc32_options(written)
    try:
        yield
    finally:
        set_crc32_options(before)
