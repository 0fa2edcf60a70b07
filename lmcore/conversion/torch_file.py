"""Files of `torch.save` in checkpoints of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["save_file", "separate"]


def save_file(content: Any, path: Path, **options: Any) -> None:
    """Write a file that `torch.load` reads.

    Args:
        content: Tensors and other values.
        path: Path of the file.
        options: Further arguments of `torch.save`.

    Raises:
        OSError: The disk is full or refuses.
    """
    try:
        # Given a path, torch writes the file itself, and no error has the cause of a failure.
        with path.open("wb") as stream:
            torch.save(content, stream, **options)
    except RuntimeError as error:
        # After a failed write, torch fails again when it ends the file.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def separate(tensor: Tensor) -> Tensor:
    """Return a tensor with separate memory: `torch.save` stores the whole memory of a view."""
    return tensor.clone(memory_format=torch.contiguous_format)
