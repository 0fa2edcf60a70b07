"""Kernels of the device under the modules of a model that is not lmcore's own."""

from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.module_kernels.use import use_kernels

__all__ = ["KernelReport", "use_kernels"]
