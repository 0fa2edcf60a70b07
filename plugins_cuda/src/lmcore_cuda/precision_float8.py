"""Projections in 8 bits: each factor of a product is scaled as a whole to fill its format.

For y = x w^T + b with a gradient g of y, all three products are 8-bit: x and w in e4m3, g, whose
values spread more, in e5m2 (Micikevicius et al., 2022).  The scale is computed from the largest
value each time: nothing is carried from step to step, and nothing is saved.  It is a power of two,
so that scaling itself rounds nothing.  Weights stay in their own dtype outside the product, and the
weight's gradient comes out of it in float32.

Works on the CPU too, where torch computes such products by widening them.

Shapes: M rows (all leading dims), I inputs, O outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["convert", "linear", "quantize"]

FACTORS = torch.float8_e4m3fn
GRADIENTS = torch.float8_e5m2
OUTPUT = torch.bfloat16
_ALIGNED = 16
"""Inner and outer sizes of the hardware's products are multiples of this."""

_LEAST = 1e-12  # of all zeros nothing can fill the format


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in an 8-bit *dtype*, scaled, and the float32 number that undoes the scale.

    A NaN or an infinity in x gives NaNs, as in a product without scaling.
    """
    largest = x.detach().abs().amax().float()
    most = torch.finfo(dtype).max
    # A number by a tensor would be its product with 1 / x, a subnormal number for the largest x.
    exponent = torch.log2(torch.full_like(largest, most) / largest.clamp(min=_LEAST)).floor()
    scaled = (x.float() * torch.exp2(exponent)).clamp(-most, most)
    return scaled.to(dtype), torch.exp2(-exponent)


def _product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Return a @ b.T; both have their inner dim last, in memory too, as the hardware needs it."""
    found: Tensor = torch._scaled_mm(  # noqa: SLF001  # torch's public name takes no e5m2 by e4m3 on every version
        a_MK,
        b_NK.t(),
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=out,
        use_fast_accum=fast,
    )
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        small_MI, x_scale = quantize(x_MI, FACTORS)
        small_OI, weight_scale = quantize(weight_OI, FACTORS)
        ctx.save_for_backward(small_MI, x_scale, small_OI, weight_scale)
        ctx.dtypes = x_MI.dtype, weight_OI.dtype
        return _product(small_MI, small_OI, x_scale, weight_scale, OUTPUT, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        small_MI, x_scale, small_OI, weight_scale = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        small_MO, scale = quantize(grad_MO, GRADIENTS)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            small_IO = small_OI.t().contiguous()
            grad_x = _product(small_MO, small_IO, scale, weight_scale, OUTPUT).to(x_dtype)
        if ctx.needs_input_grad[1]:
            small_OM, small_IM = _rows_last(small_MO), _rows_last(small_MI)
            grad_weight = _product(small_OM, small_IM, scale, x_scale, torch.float32)
            grad_weight = grad_weight.to(weight_dtype)
        return grad_x, grad_weight


def _rows_last(x_MC: Tensor) -> Tensor:
    """Return x with its rows last in memory, and zeros added up to a size that products take."""
    missing = -x_MC.shape[0] % _ALIGNED
    if missing:
        # torch fills 8-bit tensors through their bytes; a zero is a byte of zero.
        padded = functional.pad(x_MC.view(torch.uint8), (0, 0, 0, missing))
        x_MC = padded.view(x_MC.dtype)
    return x_MC.t().contiguous()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in bfloat16, by 8-bit products; the last dim of x is projected.

    Sizes that the hardware's products do not take are projected as without 8 bits.
    """
    outputs, inputs = weight_OI.shape
    if inputs % _ALIGNED or outputs % _ALIGNED or not x.numel():
        return functional.linear(x, weight_OI, bias_O)
    out_MO: Tensor = _Linear.apply(x.reshape(-1, inputs), weight_OI)  # type: ignore[no-untyped-call]
    out = out_MO.view(*x.shape[:-1], outputs)
    return out if bias_O is None else out + bias_O.to(out.dtype)


def _forward(projection: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, projection.weight, projection.bias)


def convert(model: nn.Module) -> None:
    """Make every projection of a model compute in 8 bits; its parameters do not change.

    A projection that calls a bound op gets another op, so that later wrappers still wrap it.
    """
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        if callable(getattr(module, "op", None)):
            setattr(module, "op", linear)  # noqa: B010 - torch's modules declare no such attribute
        else:
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]
