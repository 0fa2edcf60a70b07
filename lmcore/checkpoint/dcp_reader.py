"""Reads tensors in torch's distributed checkpoint format, from an index that was checked first."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from lmcore.errors import CheckpointError

if TYPE_CHECKING:
    from torch.futures import Future

__all__ = ["read_tensors"]


def read_tensors(
    directory: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor], num_threads: int
) -> None:
    """Fill *tensors* in place from *directory*, whose checked index is *metadata*.

    Raises:
        CheckpointError: stored bytes that are not the tensor that the index promises.
    """
    reader = _CheckedReader(directory, metadata, num_threads)
    with warnings.catch_warnings():
        # torch announces that it loads in a single process, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as failure:
            raise next(error for error, _trace in failure.failures.values()) from failure


class _CheckedReader(FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata, num_threads: int) -> None:
        super().__init__(directory)
        self.directory = directory
        self._metadata = metadata
        self._num_threads = num_threads

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            per_file[place.relative_path].append((place, item))
        with ThreadPoolExecutor(max_workers=self._num_threads) as pool:
            running = [
                pool.submit(self._read_file, name, reads, planner)
                for name, reads in per_file.items()
            ]
        for task in running:
            task.result()
        done: Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read_file(
        self, name: str, reads: Sequence[tuple[_StorageInfo, ReadItem]], planner: LoadPlanner
    ) -> None:
        with (self.directory / name).open("rb") as stream:
            for place, item in sorted(reads, key=lambda read: read[0].offset):
                self._read_item(stream, place, item, planner)

    def _read_item(
        self, stream: IO[bytes], place: _StorageInfo, item: ReadItem, planner: LoadPlanner
    ) -> None:
        if item.type != LoadItemType.TENSOR:
            raise _not_promised(item, "it is not a tensor")
        part = self._slice_file(stream, place)
        try:
            # Restricted to plain data: nothing in the file can name code to run.
            stored = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:
            # torch's own text suggests loading without the restriction: never show it.
            raise _not_promised(item, f"reading it failed: `{type(error).__name__}`") from error
        expected = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if type(stored) is not torch.Tensor or stored.layout != torch.strided:
            raise _not_promised(item, "it is not a plain tensor")
        if stored.dtype != expected.properties.dtype:  # type: ignore[union-attr]
            raise _not_promised(item, f"its dtype is `{stored.dtype}`")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if dim >= stored.dim() or start + length > stored.size(dim):
                raise _not_promised(item, f"its shape is {list(stored.shape)}")
            stored = stored.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != stored.shape:
            raise _not_promised(item, f"its shape is {list(stored.shape)}")
        target.copy_(stored)
        planner.commit_tensor(item, target)


def _not_promised(item: ReadItem, why: str) -> CheckpointError:
    return CheckpointError(
        f"tensor `{item.storage_index.fqn}` is not stored as the checkpoint says",
        why=why,
        hint="use an earlier checkpoint, or restore this one from a copy",
    )
