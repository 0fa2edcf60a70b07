"""Gradient clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_by_norm"]

_MARGIN = 1e-6


@torch.no_grad()
def clip_by_norm(
    gradients: list[Tensor], norm: float, limit: float, *, loss_scale: float = 1.0
) -> None:
    """Divide *gradients* in place by the loss scale, and so that their norm is at most *limit*.

    Args:
        gradients: All gradients of the model, each *loss_scale* times what it stands for.
        norm: Their Euclidean norm without that factor, finite.
        limit: Largest norm; 0 does not clip.
        loss_scale: What the loss was multiplied by.
    """
    factor = min(limit / (norm + _MARGIN), 1.0) if limit > 0 else 1.0
    if factor != loss_scale:
        torch._foreach_mul_(gradients, factor / loss_scale)
