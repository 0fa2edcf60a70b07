"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete without an error) and has no checksums; its planner exchanges objects by collectives,
which a thread beside training must not call.  The files are the same, so that any tool for the
format reads them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from lmcore.checkpoint.manifest import FileEntry
from lmcore.checkpoint.synced_file import SyncedFile
from lmcore.threads import map_in_threads

__all__ = ["ByteRange", "Written", "write_chunks"]


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


def _write_file(path: Path, chunks: Sequence[torch.Tensor]) -> tuple[FileEntry, list[ByteRange]]:
    ranges = []
    with SyncedFile(path) as stream:
        for chunk in chunks:
            start = stream.tell()
            torch.save(_on_host(chunk), cast("IO[bytes]", stream))
            stream.check()
            ranges.append(ByteRange(path.name, start, stream.tell() - start))
    return stream.entry(), ranges


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
