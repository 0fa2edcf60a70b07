"""Rotary positional encoding (Su et al., 2021): queries and keys are rotated by their position.

The first 2R channels of each head are rotated, channel i together with channel i + R.  The angles
are computed once per forward pass, on the device, from the positions only: the model stores no
table, and the host does not wait.

Shapes: B batch, N heads, S sequence, D head channels, R rotated pairs, P positions: S if all
samples have the same, else B * S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["Rotation", "rotate", "rotation_of", "rotation_speeds"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles, [P, R]."""

_TRAINED_LENGTH = 8192
_FEWEST_TURNS, _MOST_TURNS = 1.0, 4.0
"""Llama 3.1's bounds: within `_TRAINED_LENGTH` tokens, pairs with fewer turns than the first are
slowed down fully, pairs with more turns than the second not at all."""


def rotation_of(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> Rotation:
    """Return cosine and sine of the rotation angles, in at least float32.

    Args:
        positions: Positions, int64 [S] or [B, S].
        shape: Number of rotated channels, base and scaling.
        dtype: Dtype of the hidden states.
    """
    wide = torch.promote_types(dtype, torch.float32)
    speed_R = rotation_speeds(shape, wide, positions.device)
    angle_PR = positions.flatten().to(wide).unsqueeze(-1) * speed_R
    return angle_PR.cos(), angle_PR.sin()


def rotation_speeds(
    shape: ModelShape, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return the angle between two positions for each rotated pair of channels, [R].

    Args:
        shape: Number of rotated channels, base and scaling.
        dtype: Dtype of the angles.
        device: Device of the angles; None: torch's default.
    """
    pairs = shape.rotary_dim // 2
    fraction_R = torch.arange(pairs, dtype=dtype, device=device) / pairs
    return _scaled(shape.rotary_base**-fraction_R, shape.rope_scaling_factor)


def _scaled(speed_R: Tensor, factor: float) -> Tensor:
    """Return slower angles for a longer context, by Llama 3.1's rule; factor 1 changes nothing."""
    if factor == 1.0:
        return speed_R
    turns_R = speed_R * (_TRAINED_LENGTH / (2 * math.pi))
    kept_R = ((turns_R - _FEWEST_TURNS) / (_MOST_TURNS - _FEWEST_TURNS)).clamp(0.0, 1.0)
    return speed_R * (kept_R + (1.0 - kept_R) / factor)


def rotate(op: Callable[..., Tensor], x_BNSD: Tensor, rotation: Rotation) -> Tensor:
    """Return rotated queries or keys, [B, N, S, D].

    The op takes one sequence of positions: samples with different positions are concatenated,
    which copies nothing if the heads of a token are adjacent in memory.

    Args:
        op: Bound `rotary_embedding`.
        x_BNSD: Queries or keys.
        rotation: Cosine and sine of the angles.
    """
    cos_PR, sin_PR = rotation
    batch, _, length, _ = x_BNSD.shape
    if cos_PR.shape[0] == length:
        return op(x_BNSD, cos_PR, sin_PR)
    joined_1NPD = x_BNSD.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    rotated_1NPD: Tensor = op(joined_1NPD, cos_PR, sin_PR)
    rotated_NBSD = torch.unflatten(rotated_1NPD.squeeze(0), 1, (batch, length))
    return rotated_NBSD.transpose(0, 1)
