"""Files of many small tensors, for which `torch.save` is slow."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def store(value: Any, path: Path) -> None:
    """Write a value; the file is complete, or absent."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    part.rename(path)


def load(path: Path) -> Any:
    """Return the value of a file."""
    return pickle.loads(path.read_bytes())
