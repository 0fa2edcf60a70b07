"""Tensors and objects in the files of a `torch_dist` checkpoint, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.checkpoint.chunk_parts import PartReader
from lmcore.checkpoint.dcp_metadata import dtype_of, read_foreign_metadata
from lmcore.checkpoint.dcp_reader import read_object

__all__ = ["StoredTensors"]


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
