"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete and nobody is told) and has no checksums; its planner exchanges objects by collectives,
which a thread beside training may not.  The files are the same, so any tool that reads the format
reads these.
"""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from lmcore.checkpoint.chunks import Box
from lmcore.checkpoint.dcp_metadata import METADATA_NAME, dtype_of
from lmcore.checkpoint.manifest import FileEntry, TensorEntry
from lmcore.checkpoint.synced_file import SyncedFile, write_durably

__all__ = ["Place", "Written", "write_index", "write_pieces"]


@dataclass(frozen=True)
class Place:
    """Where a piece is stored: a file, and the bytes of it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Written:
    """What a process has written: its synced files, and the place of each piece."""

    files: Mapping[str, FileEntry]
    places: Sequence[Place]


def write_pieces(
    directory: Path, pieces: Sequence[torch.Tensor], *, rank: int, num_threads: int
) -> Written:
    """Write *pieces* into *directory*, one file a thread, and sync them.

    Args:
        directory: Where no file of this rank is.
        pieces: On any device.
        rank: Names the files.
        num_threads: At most as many files.

    Raises:
        OSError: A write failed; the files are then incomplete.
    """
    shares = [share for share in _shares(pieces, num_threads) if share]
    names = [f"__{rank}_{number}.distcp" for number in range(len(shares))]
    with ThreadPoolExecutor(max_workers=max(1, len(shares))) as pool:
        running = [
            pool.submit(_write_file, directory / name, [pieces[number] for number in share])
            for name, share in zip(names, shares, strict=True)
        ]
    files: dict[str, FileEntry] = {}
    places: dict[int, Place] = {}
    for name, share, task in zip(names, shares, running, strict=True):
        files[name], own = task.result()
        places.update(zip(share, own, strict=True))
    return Written(files, [places[number] for number in range(len(pieces))])


def write_index(
    directory: Path,
    tensors: Mapping[str, TensorEntry],
    stored: Iterable[tuple[str, Box, Place]],
) -> FileEntry:
    """Write the index of all *tensors*: name, box and place of each piece; return the synced file.

    Raises:
        OSError: The write failed.
    """
    by_name: dict[str, list[tuple[Box, Place]]] = {name: [] for name in tensors}
    for name, box, place in stored:
        by_name[name].append((box, place))
    entries: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        parts = sorted(by_name[name], key=lambda part: part[0])
        chunks = [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box, _ in parts
        ]
        properties = TensorProperties(dtype=dtype_of(tensor.dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, (chunk, (_, place)) in enumerate(zip(chunks, parts, strict=True)):
            index = MetadataIndex(name, chunk.offsets, number)
            places[index] = _StorageInfo(place.file, place.offset, place.length)
    metadata = Metadata(
        state_dict_metadata=dict(entries),
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),  # torch would write the path and a random number
        version="1.0.0",
    )
    return write_durably(directory / METADATA_NAME, pickle.dumps(metadata, protocol=4))


def _write_file(path: Path, pieces: Sequence[torch.Tensor]) -> tuple[FileEntry, list[Place]]:
    places = []
    with SyncedFile(path) as stream:
        for piece in pieces:
            start = stream.tell()
            torch.save(_on_host(piece), cast("IO[bytes]", stream))
            stream.check()
            places.append(Place(path.name, start, stream.tell() - start))
    return stream.entry(), places


def _on_host(data: torch.Tensor) -> torch.Tensor:
    tensor = data.detach().cpu().contiguous()
    # A view would be written with all of the storage that it looks into.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shares(pieces: Sequence[torch.Tensor], count: int) -> list[list[int]]:
    # Largest first to the share with the least: the threads end together.
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for piece in sorted(range(len(pieces)), key=lambda one: pieces[one].nbytes, reverse=True):
        load, number = heapq.heappop(loads)
        shares[number].append(piece)
        heapq.heappush(loads, (load + pieces[piece].nbytes, number))
    return shares
