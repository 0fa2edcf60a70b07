"""`linear` for compiled blocks: the compiler works on the code between the projections.

Its own way with a projection is the BLAS product.  Importing this module imports the compiler;
only `--compile` does.
"""

from __future__ import annotations

import torch

from lmcore_cpu.kernel import linear as uncompiled

__all__ = ["linear"]

linear = torch.compiler.disable(uncompiled.linear)
