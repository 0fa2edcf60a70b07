"""Gradient clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_by_norm"]

_MARGIN = 1e-6


@torch.no_grad()
def clip_by_norm(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale *gradients* in place so that their global norm is at most *limit*.

    Args:
        gradients: All gradients of the model.
        norm: Their Euclidean norm, finite.
        limit: Largest norm; 0 leaves them as they are.
    """
    factor = limit / (norm + _MARGIN)
    if limit > 0 and factor < 1.0:
        torch._foreach_mul_(gradients, factor)
