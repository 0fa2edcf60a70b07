"""Kernels that the compiler leaves alone; it works on the code between them.

Its own way with a projection is the BLAS product with a cast weight, with attention torch's fused
one, and its GELU takes several times as long.  Importing this module imports the compiler; only
`--compile` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmcore_cpu.kernel import activation, sequence_attention
from lmcore_cpu.kernel import linear as projection

__all__ = ["attention", "bias_gelu", "linear", "narrow_linear", "swiglu"]

attention = torch.compiler.disable(sequence_attention.attention)
bias_gelu = torch.compiler.disable(activation.bias_gelu)
linear = torch.compiler.disable(projection.linear)
swiglu = torch.compiler.disable(activation.swiglu)
_narrow_linear = torch.compiler.disable(projection.narrow_linear)


def narrow_linear(x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias; the compiler casts x with what comes before."""
    if torch.is_autocast_enabled("cpu"):
        x_BSI = x_BSI.to(torch.get_autocast_dtype("cpu"))
    found: Tensor = _narrow_linear(x_BSI, weight_OI, bias_O)
    return found
