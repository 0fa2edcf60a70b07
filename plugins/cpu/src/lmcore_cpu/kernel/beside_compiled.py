"""Kernels that the compiler leaves alone; it works on the code between them.

Its own way with a projection is the BLAS product, with attention torch's fused one.  Importing this
module imports the compiler; only `--compile` does.
"""

from __future__ import annotations

import torch

from lmcore_cpu.kernel import linear as projection
from lmcore_cpu.kernel import sequence_attention

__all__ = ["attention", "linear"]

attention = torch.compiler.disable(sequence_attention.attention)
linear = torch.compiler.disable(projection.linear)
