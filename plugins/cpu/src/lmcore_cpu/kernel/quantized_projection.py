"""Projections by weights of 8 or 4 bits.

On a processor without products of bfloat16, 8 bits go to `few_rows`, with activations in bfloat16
or float32.  All else is for bfloat16 activations, by torch's own operators, which are for few rows:
with many, the weight is expanded to bfloat16 and multiplied by oneDNN, 8 bits without the scales,
since bfloat16 has these integers, 4 bits with them.  On a processor without products of bfloat16 it
is expanded to float32, four times as fast.  torch's operators for other dtypes of activations are
many times slower and not used.

Shapes: M rows (all leading dims), I inputs, O outputs, G groups of inputs, N inputs of a group, P
blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.contract import ConstantProjection, QuantizedWeight
from lmcore_cpu.kernel import few_rows
from lmcore_cpu.kernel.processor import facts

__all__ = ["quantized_projection"]

_INPUTS = 32
"""Divisor of the inputs of a weight of 8 bits: torch reads them in such parts, unchecked."""
_OUTPUTS = 16
"""Divisor of the outputs of a weight of 4 bits."""
_GROUPS = frozenset({32, 64, 128, 256})
_BLOCK = 64
"""Outputs of a block of torch's layout for 4 bits."""
_MOST_ROWS_OF_8_BITS, _MOST_ROWS_OF_4_BITS = 12, 96
"""Rows up to which torch's operator is faster than expanding the weight."""
_MOST_EMULATED_ROWS_OF_8_BITS = 32
"""The same for 8 bits on a processor without products of bfloat16, by torch."""


def quantized_projection(
    weight: QuantizedWeight, wanted: ConstantProjection
) -> Callable[[Tensor], Tensor] | None:
    """Return the function of a constant projection by a quantized weight.

    None if there is no kernel for the weight, or none that includes the activation.

    Args:
        weight: The weight, of 8 or 4 bits.
        wanted: The rest of the projection.
    """
    gelu = wanted.activation is not None
    if wanted.activation not in {None, "gelu_tanh"} or not weight.values_OI.numel():
        return None
    if _few_rows_has_kernel(weight):
        return few_rows.PackedWeight(
            *(weight.values_OI, wanted.bias_O, weight.scale_OG.squeeze(1)),
            gelu=gelu,
            output=wanted.output,
        ).project
    if gelu or weight.scale_OG.dtype != torch.bfloat16:
        return None
    project = _by_torch(weight, None if wanted.bias_O is None else wanted.bias_O.bfloat16())
    if project is None:
        return None
    made, output = project, wanted.output
    return lambda x: made(x.bfloat16()).to(output)


def _by_torch(weight: QuantizedWeight, bias_O: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    outputs, inputs = weight.values_OI.shape
    if weight.bits == 8:
        fits = _scaled_by_output(weight) and inputs % _INPUTS == 0
        return _of_8_bits(weight, bias_O) if fits else None
    fits = outputs % _OUTPUTS == 0 and weight.group_size in _GROUPS
    return _of_4_bits(weight, bias_O) if fits else None


def _scaled_by_output(weight: QuantizedWeight) -> bool:
    return weight.group_size == weight.values_OI.shape[1] and weight.offset_OG is None


def _few_rows_has_kernel(weight: QuantizedWeight) -> bool:
    known = weight.scale_OG.dtype in {torch.bfloat16, torch.float32}
    fits = weight.bits == 8 and known and _scaled_by_output(weight)
    here = facts()
    return fits and bool(here.instructions) and not here.bfloat16_products


def _of_8_bits(weight: QuantizedWeight, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    values_OI = weight.values_OI.contiguous()
    scale_O = weight.scale_OG.squeeze(1).contiguous()
    inputs = values_OI.shape[1]
    product = torch.ops.aten._weight_int8pack_mm  # noqa: SLF001 - no public name
    fused, native = facts().onednn_bfloat16, facts().bfloat16_products
    few = _MOST_ROWS_OF_8_BITS if native else _MOST_EMULATED_ROWS_OF_8_BITS

    def project(x: Tensor) -> Tensor:
        x_MI = x.reshape(-1, inputs)
        if 0 < x_MI.shape[0] <= few:
            y_MO: Tensor = product(x_MI, values_OI, scale_O)
        elif not native:
            wide_MO = functional.linear(x_MI.float(), values_OI.float()).mul_(scale_O.float())
            y_MO = wide_MO.to(x.dtype)
        elif fused and x_MI.shape[0]:  # rounded once, as by torch's operator
            y_MO = torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001
                x_MI, scale_O.expand(x_MI.shape[0], -1), values_OI.to(x.dtype), None, "mul"
            )
        else:
            y_MO = functional.linear(x_MI, values_OI.to(x.dtype)).mul_(scale_O)
        return _shaped(y_MO, x, bias_O)

    return project


def _of_4_bits(weight: QuantizedWeight, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    codes_OI = weight.values_OI.to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI, 1)  # noqa: SLF001
    offset_OG = weight.offset_OG
    if offset_OG is None:
        offset_OG = torch.zeros_like(weight.scale_OG)
    tables_GO2 = torch.stack([weight.scale_OG.t(), offset_OG.t()], dim=2).contiguous()
    inputs, group = weight.values_OI.shape[1], weight.group_size
    product = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - no public name
    # The layout differs between instruction sets: where it is another one, nothing is expanded.
    known = packed.shape[0] % _BLOCK == 0 and _codes(packed).t().equal(codes_OI.to(torch.uint8))
    native = facts().bfloat16_products

    def project(x: Tensor) -> Tensor:
        x_MI = x.reshape(-1, inputs)
        if known and x_MI.shape[0] > _MOST_ROWS_OF_4_BITS:
            weight_IO = _expanded(packed, tables_GO2)
            y_MO = x_MI @ weight_IO if native else (x_MI.float() @ weight_IO.float()).to(x.dtype)
        else:
            y_MO = product(x_MI.contiguous(), packed, group, tables_GO2)
        return _shaped(y_MO, x, bias_O)

    return project


def _codes(packed: Tensor) -> Tensor:
    """Return the codes of a packed weight, uint8 [I, O].

    For each block of outputs, each input has bytes with the codes of two outputs: the first half of
    the block in the low bits, the second half in the high ones.
    """
    bytes_PI = packed.view(-1, 2 * packed.shape[1], _BLOCK // 2)
    codes_PI = torch.cat([bytes_PI & 15, bytes_PI >> 4], dim=2)
    return codes_PI.transpose(0, 1).flatten(1)


def _expanded(packed: Tensor, tables_GO2: Tensor) -> Tensor:
    """Return a weight of 4 bits in the dtype of its scales, [I, O]."""
    scale_G1O, offset_G1O = tables_GO2.float().unsqueeze(1).unbind(3)
    codes_GNO = _codes(packed).unflatten(0, (scale_G1O.shape[0], -1))
    weight_GNO = torch.addcmul(offset_G1O - 8 * scale_G1O, codes_GNO, scale_G1O)
    return weight_GNO.flatten(0, 1).to(tables_GO2.dtype)


def _shaped(y_MO: Tensor, x: Tensor, bias_O: Tensor | None) -> Tensor:
    if bias_O is not None:
        y_MO = y_MO.add_(bias_O)
    return y_MO.view(*x.shape[:-1], y_MO.shape[1])
