"""Tensors of a source that lmcore does not read: second copies, and buffers that a model computes.

A tensor is left out only after it was compared with what takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, several
from lmcore.conversion.state import require_no_problems
from lmcore.families.layers.rotary import rotation_speeds
from lmcore.model.shape import ModelShape

__all__ = ["buffer_difference", "different_copy", "require_computed", "same_values"]

_LEAST_ERROR = 1e-5
"""Relative difference that powers computed by another program may have."""
_STATE = "_extra_state"
"""Ending of the names of states that only FP8 kernels have."""
_HIDDEN = -1e3
"""Largest score that hides a position from attention."""
_COMPARED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes of weights and buffers of models; torch cannot compare all others."""


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape and values, in the wider of their dtypes.

    Tensors of a dtype that weights do not have, such as of 8-bit floats, are not the same.
    """
    if one.shape != other.shape or not {one.dtype, other.dtype} <= set(_COMPARED):
        return False
    wide = torch.promote_types(one.dtype, other.dtype)
    a, b = one.to(wide), other.to(wide)
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def different_copy(checkpoint: Path, copy: str, original: str) -> CheckpointError:
    """Return the error for an output layer that the settings of a run tie, with other values.

    Args:
        checkpoint: Directory of the checkpoint.
        copy: Name of the output layer's weight, and its place.
        original: Name of the embedding's weight, and its place.
    """
    return CheckpointError(
        f"{copy} of `{checkpoint}` differs from {original}",
        why="the settings of its run tie the output layer to the token embedding: both have the "
        "same values",
        hint="copy the files of all ranks again, of one checkpoint",
    )


def require_computed(
    checkpoint: Path, buffers: Iterable[tuple[str, str, Tensor]], shape: ModelShape
) -> list[str]:
    """Raise a `CheckpointError` that lists buffers with other values than a model computes.

    Args:
        checkpoint: Directory of the checkpoint.
        buffers: Name and values of each buffer, with its place between the two, for messages.
        shape: Shape of the model.

    Returns:
        Notes about states of FP8 kernels, which are not read.
    """
    problems, states = [], []
    for name, place, tensor in buffers:
        if name.endswith(_STATE):
            states += [name] if tensor.numel() else []
        elif (difference := buffer_difference(name, tensor, shape)) is not None:
            problems.append(f"`{name}`{place} {difference}")
    require_no_problems(checkpoint, problems)
    return [f"not read: the state of FP8 kernels, {several(states)}"] if states else []


def buffer_difference(name: str, tensor: Tensor, shape: ModelShape) -> str | None:
    """Return how a buffer differs from what a model of *shape* computes; None if it does not.

    Args:
        name: Name of the buffer, which ends with `inv_freq`, `position_ids`, `bias` (of attention)
            or `masked_bias`.
        tensor: Values of the buffer.
        shape: Shape of the model.
    """
    kind = name.rpartition(".")[2]
    if tensor.dtype not in _COMPARED:
        return f"has dtype {tensor.dtype}"
    if kind == "inv_freq":
        expected = rotation_speeds(shape, torch.float64) if shape.rotary else None
        if expected is None or not _is_close(tensor, expected):
            return "has other rotary frequencies than the settings of the model give"
    elif kind == "position_ids":
        if not torch.equal(tensor.flatten(), torch.arange(shape.max_position_embeddings)):
            return "does not count the positions"
    elif kind == "masked_bias":
        if tensor.numel() != 1 or not float(tensor) <= _HIDDEN:
            return "is not the score of a hidden position"
    elif not _is_causal(tensor):
        return "is not the mask that hides later tokens"
    return None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if not found.is_floating_point() or found.numel() != expected.numel():
        return False
    limits = torch.finfo(found.dtype)
    return torch.allclose(
        found.double().flatten(),
        expected,
        rtol=max(_LEAST_ERROR, 2 * limits.eps),
        atol=limits.smallest_normal * limits.eps,
    )


def _is_causal(mask: Tensor) -> bool:
    """Return True if a mask is 1 up to the diagonal and 0 beyond, in its last two dims."""
    size = mask.shape[-1] if mask.ndim else 0
    if mask.ndim < 2 or mask.numel() != size * size:
        return False
    matrix = mask.reshape(size, size)
    return torch.equal(matrix, torch.ones_like(matrix).tril())
