"""Safetensors files written tensor by tensor.

The `safetensors` library writes a file from tensors that are all in memory; here their dtypes and
shapes are known first, so that one at a time is enough.  A file is the length of its header (8
bytes, little-endian), the header in JSON with the byte range of each tensor, and the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lmcore.checkpoint.files.synced_file import SyncedFile
from lmcore.conversion.cast import cast

__all__ = ["SafetensorsWriter", "shards"]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


class SafetensorsWriter:
    """One file, to which the tensors of its header are appended in order, synced at its end."""

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Write the header.

        Args:
            path: Path of the new file.
            shapes: Shape of each tensor, by name, in the order of `write`.
            dtype: Dtype of all tensors.

        Raises:
            OSError: The file system refuses.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, shape in shapes.items():
            end = start + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._left = list(shapes.items())
        self._dtype = dtype
        self._stream = SyncedFile(path)
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor of the header, in the file's dtype.

        Raises:
            CheckpointError: Values would become infinite.
            OSError: The file system refuses.
        """
        expected, shape = self._left.pop(0)
        assert (name, tuple(tensor.shape)) == (expected, shape), f"`{expected}` {shape} is next"
        content = cast(name, tensor, self._dtype).contiguous().flatten().view(torch.uint8)
        self._stream.write(content.numpy().data)
        self._stream.check()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Sync and close the file, which has all tensors."""
        self._stream.__exit__(kind, error, trace)
        assert kind is not None or not self._left, f"`{self._left[0][0]}` was not written"


def shards(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in order.

    Args:
        sizes: Bytes of each tensor, by name.
        largest: Largest size of a file in bytes, which only a single tensor may exceed.
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = largest
        found[-1].append(name)
        room -= size
    return found
