"""Projections by a weight that does not change, in the layout of the fastest kernel.

`few_rows` takes float32 on processors with AVX-512 on which MKL is faster than oneDNN, and bfloat16
on processors with matrix units or without products of bfloat16.  On others oneDNN takes both, in
the order in memory that is best for it.  Measured on all products of a 124M model, 2 cores of an
Intel Xeon with AMX, for 1 to 16 rows: float32 takes 25 ms instead of 39 ms for 4 rows and 29 ms
instead of 53 ms for 8; for 1 and 2 rows MKL, in torch's layout, is faster than oneDNN.  bfloat16 on
one core, for 1 to 8 rows: matrix units read 20 GB/s, oneDNN 14 to 17.  On 2 cores of an AMD EPYC
oneDNN reads 44 to 92 GB/s of float32 for 1 row, torch 17 GB/s.  A processor without products of
bfloat16 takes 2.6 s for 900 rows, and 0.6 s if the weight is expanded to float32 for the product.

Shapes: M rows (all leading dims), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.contract import ConstantProjection, QuantizedWeight
from lmcore_cpu.kernel import few_rows
from lmcore_cpu.kernel.processor import facts
from lmcore_cpu.kernel.quantized_projection import quantized_projection

__all__ = ["constant_projection"]

_TYPICAL_ROWS = 8
"""Number of rows that oneDNN chooses a layout for; measured beside 1 and 16."""
_MOST_EMULATED_ROWS = 20
"""bfloat16 products of up to as many rows are faster than expanding the weight."""
_MOST_ROWS_OF_TORCH = 2
"""float32 products of up to as many rows are faster by MKL than by oneDNN."""


def constant_projection(wanted: ConstantProjection) -> Callable[[Tensor], Tensor] | None:
    """Return the function of a constant projection.

    None if torch's own is as fast, if there is no kernel for a quantized weight, or if the kernel
    does not include the activation.  Without `few_rows` a float32 weight stays in memory beside a
    copy in another layout where MKL is fast.
    """
    weight = wanted.weight_OI
    if isinstance(weight, QuantizedWeight):
        return quantized_projection(weight, wanted)
    if weight.numel() == 0 or wanted.activation not in {None, "gelu_tanh"}:
        return None
    if _few_rows_is_faster(weight.dtype):
        gelu = wanted.activation is not None
        return few_rows.PackedWeight(weight, wanted.bias_O, gelu=gelu, output=wanted.output).project
    if wanted.activation is not None or not facts().onednn:
        return None
    bias_O = None if wanted.bias_O is None else wanted.bias_O.to(weight.dtype)
    project = _by_libraries(weight, bias_O, wanted.rows)
    if project is None or wanted.output == weight.dtype == torch.float32:
        return project
    made, compute, output = project, weight.dtype, wanted.output
    return lambda x: made(x.to(compute)).to(output)


def _by_libraries(
    weight_OI: Tensor, bias_O: Tensor | None, rows: int
) -> Callable[[Tensor], Tensor] | None:
    dtype, here = weight_OI.dtype, facts()
    if dtype == torch.bfloat16 and here.onednn_bfloat16:
        return _packed(weight_OI, bias_O, emulated=not here.bfloat16_products)
    if dtype == torch.float32 and not here.blas_is_faster:
        return _packed(weight_OI, bias_O)
    if dtype == torch.float32 and rows > _MOST_ROWS_OF_TORCH:
        return _packed_for_many(weight_OI, bias_O)
    return None


def _packed_for_many(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    many = _packed(weight_OI, bias_O)

    def project(x_MI: Tensor) -> Tensor:
        if x_MI.numel() <= _MOST_ROWS_OF_TORCH * x_MI.shape[-1]:
            return functional.linear(x_MI, weight_OI, bias_O)
        return many(x_MI)

    return project


def _few_rows_is_faster(dtype: torch.dtype) -> bool:
    here = facts()
    if dtype == torch.float32:
        return "avx512" in here.instructions and here.blas_is_faster
    by_lmcore = here.matrix_units or not here.bfloat16_products
    return bool(here.instructions) and dtype == torch.bfloat16 and by_lmcore


def _packed(
    weight_OI: Tensor, bias_O: Tensor | None, *, emulated: bool = False
) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _TYPICAL_ROWS)  # noqa: SLF001
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public names

    wide_bias_O = None if bias_O is None else bias_O.float()

    def project(x_MI: Tensor) -> Tensor:
        if emulated and x_MI.numel() > _MOST_EMULATED_ROWS * x_MI.shape[-1]:
            wide_MO = functional.linear(x_MI.float(), packed.to_dense(torch.float32), wide_bias_O)
            return wide_MO.to(x_MI.dtype)
        found: Tensor = product(x_MI, packed, bias_O, "none", [], "")
        return found

    return project
