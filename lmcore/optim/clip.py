"""Gradient clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_as_torch", "clip_by_norm", "clip_by_norm_on_device", "clip_factor"]

_MARGIN = 1e-6


def clip_factor(norm: float, limit: float, *, loss_scale: float = 1.0) -> float:
    """Return the factor that divides gradients by the loss scale and limits their norm.

    Args:
        norm: Euclidean norm of the gradients without the loss scale, finite.
        limit: Largest norm; 0 does not clip.
        loss_scale: Factor of the loss, by which the gradients are multiplied.
    """
    return (min(limit / (norm + _MARGIN), 1.0) if limit > 0 else 1.0) / loss_scale


@torch.no_grad()
def clip_by_norm(
    gradients: list[Tensor], norm: float, limit: float, *, loss_scale: float = 1.0
) -> None:
    """Multiply *gradients* in place by `clip_factor`; for the other arguments see there."""
    factor = clip_factor(norm, limit, loss_scale=loss_scale)
    if factor != 1:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_by_norm_on_device(
    gradients: list[Tensor], norm: Tensor, limit: float, *, divisor: Tensor | None = None
) -> None:
    """Do the same as `clip_by_norm` without synchronizing with the device.

    Args:
        gradients: All gradients of the model, on one device, multiplied by *divisor*.
        norm: Euclidean norm of these gradients, a scalar on that device; in float64 the factor is
            equal to `clip_by_norm`'s, rounded as there, to float32 for all but float64.
        limit: Largest norm of the gradients without *divisor*; 0 does not clip.
        divisor: Number to divide by, a scalar on that device; None: 1.
    """
    if not gradients or (limit <= 0 and divisor is None):
        return
    if divisor is not None:
        norm = norm / divisor
    factor = torch.ones_like(norm)
    if limit > 0:
        # Not `limit / norm`, which torch computes as a product with the reciprocal.
        factor = torch.full_like(norm, limit).div_(norm + _MARGIN).clamp_(max=1.0)
    if divisor is not None:
        factor = factor / divisor
    torch._foreach_mul_(
        gradients, factor.to(torch.promote_types(torch.float32, gradients[0].dtype))
    )


@torch.no_grad()
def clip_as_torch(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Clip bit for bit as `torch.nn.utils.clip_grad_norm_`, without synchronizing with the device.

    Args:
        gradients: All gradients, on one device.
        norm: Euclidean norm of the gradients, a scalar on that device.
        limit: Largest norm.
    """
    torch._foreach_mul_(gradients, (limit / (norm + _MARGIN)).clamp_(max=1.0))
