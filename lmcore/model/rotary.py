"""Rotary positions: queries and keys are turned by angles that grow with their place.

Su et al., 2021; of each head the first 2R channels are turned, channel i together with channel
i + R.  The angles are made once for a forward pass, on the device and from nothing but the places,
so that nothing is stored with the model and nobody waits.

Shapes: B batch, N heads, S sequence, D head channels, R turned pairs, P places: S where all samples
have the same, B * S where each has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["Rotation", "rotate", "rotation_of"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles, [P, R]."""

_TRAINED_LENGTH = 8192
_FEWEST_TURNS, _MOST_TURNS = 1.0, 4.0
"""Llama 3.1's: within so many tokens, pairs that turn less than the former are slowed down whole,
those that turn more than the latter not at all."""


def rotation_of(places: Tensor, shape: ModelShape, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at some places, in at least float32.

    Args:
        places: Integers, [S] or [B, S].
        shape: Says how many channels are turned, and how fast.
        dtype: Of the hidden states.
    """
    wide = torch.promote_types(dtype, torch.float32)
    pairs = shape.rotary_dim // 2
    share_R = torch.arange(pairs, dtype=wide, device=places.device) / pairs
    speed_R = _scaled(shape.rotary_base**-share_R, shape.rope_scaling_factor)
    angle_PR = places.flatten().to(wide).unsqueeze(-1) * speed_R
    return angle_PR.cos(), angle_PR.sin()


def _scaled(speed_R: Tensor, factor: float) -> Tensor:
    """Return slower angles for a longer context, as Llama 3.1 has them; 1: as they are."""
    if factor == 1.0:
        return speed_R
    turns_R = speed_R * (_TRAINED_LENGTH / (2 * math.pi))
    kept_R = ((turns_R - _FEWEST_TURNS) / (_MOST_TURNS - _FEWEST_TURNS)).clamp(0.0, 1.0)
    return speed_R * (kept_R + (1.0 - kept_R) / factor)


def rotate(op: Callable[..., Tensor], x_BNSD: Tensor, rotation: Rotation) -> Tensor:
    """Return x turned by the bound `rotary_embedding`.

    The op knows one sequence of places: samples that have their own are laid end to end, which
    moves nothing where the heads of a token lie together.
    """
    cos_PR, sin_PR = rotation
    batch, _, length, _ = x_BNSD.shape
    if cos_PR.shape[0] == length:
        return op(x_BNSD, cos_PR, sin_PR)
    joined_1NPD = x_BNSD.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    turned_1NPD: Tensor = op(joined_1NPD, cos_PR, sin_PR)
    turned_NBSD = torch.unflatten(turned_1NPD.squeeze(0), 1, (batch, length))
    return turned_NBSD.transpose(0, 1)
