"""Quantization of weights to small integers, and products with them on any device.

Only weights are quantized, activations are not: a row of a product does not depend on other rows.

Shapes: O outputs, I inputs, G groups of inputs that share a scale, N inputs of a group, M rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.contract.generation_kernels import QuantizedWeight

__all__ = ["GROUP", "expanded_projection", "quantize"]

GROUP = 32
"""Inputs that share a scale with 4 bits."""


def quantize(weight_OI: Tensor, bits: int, dtype: torch.dtype) -> QuantizedWeight | None:
    """Return a weight rounded to the nearest integers; None if it cannot be split into groups.

    With 8 bits each output has a scale, with 4 bits each `GROUP` inputs of an output have a scale
    and an offset, which map the lowest weight to -8 and the highest to 7; equal weights are 0, and
    the offset has their value.

    Args:
        weight_OI: Weight in a floating-point dtype.
        bits: 8 or 4.
        dtype: Dtype of the products; scales are rounded to it before they are used.
    """
    wide_OI = weight_OI.to(torch.promote_types(weight_OI.dtype, torch.float32))
    if bits == 8:
        highest_O1 = wide_OI.abs().amax(dim=1, keepdim=True)
        scale_O1 = _positive(_rounded(highest_O1 / 127, dtype))
        values_OI = (wide_OI / scale_O1).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight(8, values_OI, scale_O1.to(dtype))
    assert bits == 4
    if wide_OI.shape[1] % GROUP:
        return None
    wide_OGN = wide_OI.unflatten(1, (-1, GROUP))
    low_OG1, high_OG1 = wide_OGN.amin(dim=2, keepdim=True), wide_OGN.amax(dim=2, keepdim=True)
    step_OG1 = _rounded((high_OG1 - low_OG1) / 15, dtype)
    offset_OG1 = _rounded(low_OG1 + 8 * step_OG1, dtype)
    scale_OG1 = _positive(step_OG1)
    values_OGN = ((wide_OGN - offset_OG1) / scale_OG1).round().clamp(-8, 7).to(torch.int8)
    scale_OG, offset_OG = (one.squeeze(2).to(dtype) for one in (scale_OG1, offset_OG1))
    return QuantizedWeight(4, values_OGN.flatten(1), scale_OG, offset_OG)


def _rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as *dtype* has them, in their own dtype."""
    return wide.to(dtype).to(wide.dtype)


def _positive(scale: Tensor) -> Tensor:
    """Return scales with 1 in place of 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def expanded_projection(
    weight: QuantizedWeight, bias_O: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return x -> x @ weight.T + bias that expands the weight for each product.

    It keeps the memory of a quantized weight, and takes longer than a weight that is not quantized.

    Args:
        weight: Quantized weight.
        bias_O: Bias in the dtype of the products; None for none.
    """
    stored = _packed(weight.values_OI) if weight.bits == 4 else weight.values_OI
    scale_OG1 = weight.scale_OG.unsqueeze(2)
    offset_OG1 = None if weight.offset_OG is None else weight.offset_OG.unsqueeze(2)
    bits, group = weight.bits, weight.group_size

    def project(x_MI: Tensor) -> Tensor:
        values_OI = _unpacked(stored) if bits == 4 else stored
        wide = torch.promote_types(scale_OG1.dtype, torch.float32)
        weight_OGN = values_OI.unflatten(1, (-1, group)).to(wide).mul_(scale_OG1)
        if offset_OG1 is not None:
            weight_OGN.add_(offset_OG1)
        return functional.linear(x_MI, weight_OGN.flatten(1).to(scale_OG1.dtype), bias_O)

    return project


def _packed(values_OI: Tensor) -> Tensor:
    """Return values of 4 bits, two in a byte."""
    codes = (values_OI + 8).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    """Return the int8 values that `_packed` took."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=2)
    return pairs.flatten(1).to(torch.int8) - 8
