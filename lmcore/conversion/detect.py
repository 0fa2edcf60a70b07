"""Recognition of a checkpoint's format by its files, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.checkpoint.manifest import MANIFEST_NAME
from lmcore.conversion.deepspeed.directory import is_deepspeed
from lmcore.conversion.huggingface.config import is_huggingface
from lmcore.conversion.megatron.directory import is_megatron, is_megatron_dist

__all__ = ["MATCHES", "format_of"]


def _is_lmcore(directory: Path) -> bool:
    inside = directory / CHECKPOINTS_NAME
    folders = (directory, *directory.glob("iter_*"), *inside.glob("iter_*"))
    return any((folder / MANIFEST_NAME).is_file() for folder in folders)


MATCHES: Mapping[str, Callable[[Path], bool]] = MappingProxyType(
    {
        "lmcore": _is_lmcore,
        "huggingface": is_huggingface,
        "megatron": is_megatron,
        "megatron-dist": is_megatron_dist,
        "megatron-deepspeed": is_deepspeed,
    }
)
"""Function that recognizes each format, by the format's name."""


def format_of(directory: Path) -> str | None:
    """Return the name of the format of the checkpoint in *directory*; None if none matches."""
    return next((name for name, matches in MATCHES.items() if matches(directory)), None)
