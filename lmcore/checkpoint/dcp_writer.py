"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete without an error) and has no checksums; its planner exchanges objects by collectives,
which a thread beside training must not call.  The files are the same, so that any tool for the
format reads them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from lmcore.accelerator.dtype import dtype_name
from lmcore.checkpoint.manifest import FileEntry, TensorEntry
from lmcore.checkpoint.synced_file import SyncedFile
from lmcore.parallel.tensor_layout import Chunk, box
from lmcore.threads import map_in_threads

__all__ = ["ByteRange", "Written", "write_chunks", "write_streamed"]


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
    written = map_in_threads(
        lambda file: _write_file(directory / file[0], [chunks[number] for number in file[1]]),
        list(zip(names, groups, strict=True)),
        len(groups),
    )
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
) -> Written:
    """Write tensors that are read one at a time into one file of *directory*, and sync it.

    Args:
        directory: Directory without files of rank 0.
        chunks: Tensor name and chunk of the whole tensor, by key.
        entries: Dtype and shape of each tensor, by name, in the order of reading.
        read: Returns the whole tensor with a name, on any device.

    Raises:
        OSError: A write failed; the file is then incomplete.
        ValueError: A tensor is not as its entry says (a bug).
    """
    of_tensor: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for key, (name, chunk) in chunks.items():
        of_tensor[name].append((key, chunk))
    ranges: dict[str, ByteRange] = {}
    with SyncedFile(directory / "__0_0.distcp") as stream:
        for name, entry in entries.items():
            tensor = read(name)
            found = TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape))
            if found != entry:
                raise ValueError(f"`{name}` is {found}, not {entry}")
            for key, chunk in of_tensor[name]:
                ranges[key] = _write_chunk(stream, box(tensor, chunk.start, chunk.size))
            del tensor  # before the next is read
    files = {stream.path.name: stream.entry()}
    return Written(files, [ranges[key] for key in chunks])


def _write_file(path: Path, chunks: Sequence[torch.Tensor]) -> tuple[FileEntry, list[ByteRange]]:
    with SyncedFile(path) as stream:
        ranges = [_write_chunk(stream, chunk) for chunk in chunks]
    return stream.entry(), ranges


def _write_chunk(stream: SyncedFile, chunk: torch.Tensor) -> ByteRange:
    start = stream.tell()
    torch.save(_on_host(chunk), cast("IO[bytes]", stream))
    stream.check()
    return ByteRange(stream.path.name, start, stream.tell() - start)


def _on_host(data: torch.Tensor) -> torch.Tensor:
    tensor = data.detach().cpu().contiguous()
    # A view would be written with all of its storage.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _balance(chunks: Sequence[torch.Tensor], count: int) -> list[list[int]]:
    """Divide the numbers of chunks into groups of about as many bytes, for the threads."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for chunk in sorted(range(len(chunks)), key=lambda one: chunks[one].nbytes, reverse=True):
        load, number = heapq.heappop(loads)
        groups[number].append(chunk)
        heapq.heappush(loads, (load + chunks[chunk].nbytes, number))
    return groups
