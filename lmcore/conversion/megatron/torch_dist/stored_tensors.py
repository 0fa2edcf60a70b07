"""Tensors and objects in the files of a `torch_dist` checkpoint, read one at a time.

Parts of stored chunks, read without the rest of a chunk, which may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lmcore.checkpoint.dcp_metadata import StoredChunk, dtype_of, read_foreign_metadata
from lmcore.checkpoint.dcp_reader import (
    Copy,
    copies_of,
    opened,
    opened_record,
    read_chunk,
    read_object,
    read_rows,
)
from lmcore.checkpoint.strided_record import StridedRecord
from lmcore.parallel.tensor_layout import Chunk, TensorLayout, box

__all__ = [
    "PartReader",
    "StoredTensors",
]


class PartReader:
    """Reader of parts of chunks, for files that have no manifest with their checksums.

    Of a chunk in the order of its elements the rows of a part are read, of any other one all of it.
    Its checksums are compared once, when a part of it is read for the first time.
    """

    def __init__(self, directory: Path, *, compare: bool = True) -> None:
        """Remember the checkpoint.

        Args:
            directory: Directory of the checkpoint.
            compare: True to compare torch's checksum of each chunk.
        """
        self._directory, self._compare = directory, compare
        self._records: dict[StoredChunk, StridedRecord | None] = {}

    def read(
        self,
        chunks: Sequence[StoredChunk],
        dtype: str,
        shape: tuple[int, ...],
        first: tuple[int, ...],
        size: tuple[int, ...],
    ) -> Tensor:
        """Return a part of a tensor.

        Args:
            chunks: Chunks of the tensor.
            dtype: Name of its dtype.
            shape: Its shape.
            first: Index of the part's first element.
            size: Shape of the part.

        Raises:
            CheckpointError: A file cannot be read, is damaged, or has another tensor.
        """
        layout = TensorLayout(shape, (Chunk((0,) * len(size), first, size),))
        part = torch.empty(size, dtype=dtype_of(dtype))
        for chunk in chunks:
            for copy in copies_of(chunk, part, layout):
                path = self._directory / chunk.file
                with opened(path) as stream:
                    self._fill(copy, stream, path, chunk, dtype)
        return part

    def _fill(
        self, copy: Copy, stream: BinaryIO, path: Path, chunk: StoredChunk, dtype: str
    ) -> None:
        if chunk not in self._records:
            self._records[chunk] = opened_record(stream, path, chunk, compare=self._compare)
        record = self._records[chunk]
        size = tuple(copy.target.shape)
        if record is None or (record.dtype, record.shape) != (dtype, chunk.bounds.size) or not size:
            stored = read_chunk(stream, path, chunk, dtype)
            copy.target.copy_(box(stored, copy.start, size))
            return
        target = copy.target
        rows = target
        if not target.is_contiguous() or size[1:] != record.shape[1:]:
            rows = torch.empty(size[0], *record.shape[1:], dtype=target.dtype)
        read_rows(stream, path, chunk, record, copy.start[0], rows)
        if rows is not target:
            target.copy_(box(rows, (0, *copy.start[1:]), size))


class StoredTensors:
    """Tensors and objects of one checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        entries: Dtype and shape of each tensor.
        objects: Position of each object.
    """

    def __init__(self, path: Path, *, compare: bool = True) -> None:
        """Read the index.

        Args:
            path: Directory of the checkpoint.
            compare: True to compare the checksums of what is read.

        Raises:
            CheckpointError: The index is missing, damaged, or names code.
        """
        index = read_foreign_metadata(path)
        self.path, self.entries, self.objects = path, index.tensors, index.objects
        self._chunks = index.chunks
        self._parts = PartReader(path, compare=compare)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return dtype_of(self.entries[name].dtype)

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """Return a tensor, or one layer of it.

        Args:
            name: Name of the tensor.
            layer: Index in the first dim; None: all of it.

        Raises:
            CheckpointError: The file is damaged.
        """
        size = self.entries[name].shape
        if layer is None:
            return self._part(name, size, (0,) * len(size))
        return self._part(name, (1, *size[1:]), (layer, *(0,) * (len(size) - 1)))[0]

    def read_range(self, name: str, start: int, count: int) -> Tensor:
        """Return *count* elements of a vector, from *start* on.

        Args:
            name: Name of the vector.
            start: First element.
            count: Number of elements.

        Raises:
            CheckpointError: The file is damaged.
        """
        return self._part(name, (count,), (start,))

    def read_object(self, name: str, *, large: bool = False) -> Any:
        """Return an object of plain values.

        Args:
            name: Name of the object.
            large: True for an object that may have all of a rank's tensors.

        Raises:
            CheckpointError: It is damaged, or contains anything else.
        """
        return read_object(self.path, name, self.objects[name], large=large)

    def _part(self, name: str, size: tuple[int, ...], first: tuple[int, ...]) -> Tensor:
        entry = self.entries[name]
        return self._parts.read(self._chunks[name], entry.dtype, entry.shape, first, size)
