"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete without an error) and has no checksums; its planner exchanges objects by collectives,
which a thread beside training must not call.  The files are the same, so that any tool for the
format reads them.
"""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.checkpoint.dcp_metadata import METADATA_NAME, dtype_of
from lmcore.checkpoint.manifest import FileEntry, TensorEntry
from lmcore.checkpoint.synced_file import SyncedFile, write_durably
from lmcore.threads import map_in_threads

__all__ = ["ByteRange", "Written", "write_chunks", "write_index"]


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


def write_index(
    directory: Path,
    tensors: Mapping[str, TensorEntry],
    stored: Iterable[tuple[str, ChunkBounds, ByteRange]],
) -> FileEntry:
    """Write and sync the index of a checkpoint; return the file's size and checksum.

    Args:
        directory: Directory of the checkpoint.
        tensors: Dtype and shape of each tensor, by name.
        stored: Tensor name, chunk and byte range of each stored chunk, in any order.

    Raises:
        OSError: The write failed.
    """
    by_name: dict[str, list[tuple[ChunkBounds, ByteRange]]] = {name: [] for name in tensors}
    for name, chunk, byte_range in stored:
        by_name[name].append((chunk, byte_range))
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        parts = sorted(by_name[name], key=lambda part: part[0])
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))
            for chunk, _ in parts
        ]
        properties = TensorProperties(dtype=dtype_of(tensor.dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, (metadata_chunk, (_, found)) in enumerate(zip(chunks, parts, strict=True)):
            index = MetadataIndex(name, metadata_chunk.offsets, number)
            storage[index] = _StorageInfo(found.file, found.offset, found.length)
    metadata = Metadata(
        state_dict_metadata=dict(entries),
        planner_data={name: (name,) for name in tensors},
        storage_data=storage,
        storage_meta=StorageMeta(),  # torch would write the path and a random number
        version="1.0.0",
    )
    return write_durably(directory / METADATA_NAME, pickle.dumps(metadata, protocol=4))


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
