"""Casts of tensors, refused if values would become infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError
from lmcore.contract.dtype import dtype_name

__all__ = ["FLOAT_DTYPES", "cast"]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes in which weights and states of optimizers are read."""


def cast(name: str, tensor: Tensor, dtype: torch.dtype, *, option: str = "--dtype") -> Tensor:
    """Return a tensor in another dtype, which may round its values.

    Args:
        name: Name of the tensor, for the message.
        tensor: Tensor of any dtype.
        dtype: Dtype of the result.
        option: Option that asked for *dtype*, for the message.

    Raises:
        CheckpointError: Values would become infinite.
    """
    found = tensor.to(dtype)
    if _has_smaller_range(dtype, tensor.dtype) and not bool(found.isfinite().all()):
        lost = int((tensor.isfinite() & ~found.isfinite()).sum())
        if lost:
            raise CheckpointError(
                f"`{name}` cannot be cast to {dtype_name(dtype)}",
                why=f"{lost:,} of its values are too large and would become infinite",
                hint=f"choose another dtype by `{option}`, such as bfloat16",
            )
    return found


def _has_smaller_range(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Return True if a finite value of *source* may be too large for *dtype*."""
    if not dtype.is_floating_point:
        return False
    return not source.is_floating_point or torch.finfo(dtype).max < torch.finfo(source).max
