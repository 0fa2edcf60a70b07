"""`rotary_embedding`: reads heads in place, as in a packed projection, and keeps no input.

Shapes: B batch, S sequence, N heads, D head channels, R rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore_triton.kernel.rotary import rotate
from lmcore_triton.launching import is_traced, kernel_op, power_of_two, warps_for

__all__ = ["rotary_embedding"]

_TILE = 1024


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@kernel_op("rotary")
def _rotate(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor, *, back: bool) -> Tensor:
    x_BNSD = _side_by_side(x_BNSD)
    cos_SR, sin_SR = _side_by_side(cos_SR), _side_by_side(sin_SR)
    out_BNSD = torch.empty_like(x_BNSD)  # heads lie in the same order
    if not x_BNSD.numel():
        return out_BNSD
    batch, num_heads, length, channels = x_BNSD.shape
    half = cos_SR.shape[-1]
    block = power_of_two(half)
    heads = min(power_of_two(num_heads), max(1, _TILE // block))
    kernel = wrap_triton(rotate) if is_traced(x_BNSD) else rotate
    kernel[(batch * length, -(-num_heads // heads))](
        x_BNSD,
        cos_SR,
        sin_SR,
        out_BNSD,
        length,
        num_heads,
        *x_BNSD.stride()[:3],
        *out_BNSD.stride()[:3],
        cos_SR.stride(0),
        sin_SR.stride(0),
        HALF=half,
        REST=channels - 2 * half,
        BACK=back,
        HEADS=heads,
        BLOCK=block,
        REST_BLOCK=power_of_two(channels - 2 * half),
        num_warps=warps_for(heads * block),
    )
    return out_BNSD


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SR, sin_SR)
        return _rotate(x_BNSD, cos_SR, sin_SR, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor, None, None]:
        cos_SR, sin_SR = ctx.saved_tensors
        return _rotate(grad_BNSD, cos_SR, sin_SR, back=True), None, None


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    return _Rotation.apply(x_BNSD, cos_SR, sin_SR)  # type: ignore[no-untyped-call,no-any-return]
