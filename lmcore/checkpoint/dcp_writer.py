"""Writes tensors in torch's distributed checkpoint format: in parallel, checksummed and synced.

torch's own file writer loses a failure in any thread but the first (the checkpoint is then
incomplete and nobody is told) and has no checksums; the files are otherwise the same, so any
tool that reads the format reads these.
"""

from __future__ import annotations

import heapq
import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from lmcore.checkpoint.dcp_metadata import METADATA_NAME
from lmcore.checkpoint.durable_file import SyncedFile, write_durably
from lmcore.checkpoint.manifest import FileEntry

if TYPE_CHECKING:
    from torch.futures import Future

__all__ = ["write_tensors"]


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], num_threads: int
) -> dict[str, FileEntry]:
    """Write *tensors* into the empty *directory*, one file a thread; return the synced files.

    Raises:
        OSError: a write failed; the directory is then incomplete.
    """
    writer = _ChecksummingWriter(directory, num_threads)
    with warnings.catch_warnings():
        # torch announces that it saves in a single process, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(dict(tensors), storage_writer=writer, no_dist=True)
        except CheckpointException as failure:
            # Not an `Exception`: it would pass every handler that waits for one.
            raise next(error for error, _trace in failure.failures.values()) from failure
    return dict(sorted(writer.files.items()))


class _ChecksummingWriter(FileSystemWriter):
    def __init__(self, directory: Path, num_threads: int) -> None:
        super().__init__(directory, thread_count=num_threads, overwrite=False)
        self.directory = directory
        self.files: dict[str, FileEntry] = {}

    def storage_meta(self) -> StorageMeta:
        # torch writes the path and a random number here; both would differ from save to save.
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares = [share for share in _shares(plan.items, self.thread_count) if share]
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(shares))]
        with ThreadPoolExecutor(max_workers=max(1, len(shares))) as pool:
            running = [
                pool.submit(self._write_file, name, share, planner)
                for name, share in zip(names, shares, strict=True)
            ]
        results: list[WriteResult] = []
        for name, task in zip(names, running, strict=True):
            self.files[name], written = task.result()
            results += written
        done: Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = "1.0.0"
        metadata.storage_data = {
            result.index: result.storage_data for share in results for result in share
        }
        metadata.storage_meta = self.storage_meta()
        content = pickle.dumps(metadata, protocol=4)
        self.files[METADATA_NAME] = write_durably(self.directory / METADATA_NAME, content)

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[FileEntry, list[WriteResult]]:
        results = []
        with SyncedFile(self.directory / name) as stream:
            for item in items:
                start = stream.tell()
                torch.save(_on_host(planner.resolve_data(item)), cast("IO[bytes]", stream))
                stream.check()
                length = stream.tell() - start
                place = _StorageInfo(name, start, length)
                results.append(WriteResult(item.index, length, place))
        return stream.entry(), results


def _on_host(data: Any) -> torch.Tensor:
    tensor = cast("torch.Tensor", data).detach().cpu().contiguous()
    # A view would be written with all of the storage that it looks into.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shares(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    # Largest first to the share with the least: the threads end together.
    shares: list[list[WriteItem]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for item in sorted(items, key=_num_bytes, reverse=True):
        load, number = heapq.heappop(loads)
        shares[number].append(item)
        heapq.heappush(loads, (load + _num_bytes(item), number))
    return shares


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "only tensors are saved"
    return math.prod(item.tensor_data.size) * item.tensor_data.properties.dtype.itemsize
