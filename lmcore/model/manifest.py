"""`Manifest`: what a checkpoint says of itself, as plain values.

`lmcore.checkpoint.manifest` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

ShapeValue: TypeAlias = int | float | str | bool | None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its dtype as torch names it (`float32`), and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: its size in bytes and its CRC-32.

    A CRC finds damage as surely as a cryptographic hash at less than half of the cost; against
    alteration on purpose neither helps, as the manifest is not signed.
    """

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    `sequence` counts the saves into one directory: after a run that went back to an older
    checkpoint, the newest save does not have the highest iteration.
    """

    format_version: int
    lmcore_version: str
    torch_version: str
    iteration: int
    sequence: int
    model_shape: Mapping[str, ShapeValue]
    meta: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
