"""Facts that decide which kernels compute here: of the processor, torch's build, the C++ kernels.

All other modules ask `facts`, so that tests can give them another processor.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore_cpu.host import CPUINFO, processor_field

if TYPE_CHECKING:
    from lmcore_cpu.kernel.native import Kernels

__all__ = ["Facts", "facts"]

_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_FLOAT16_FEATURES = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


class Facts:
    """Facts of this host, each read when it is asked for first.

    The first three need no torch; the others load it.
    """

    def __init__(self, cpuinfo: Path = CPUINFO, **given: bool | tuple[str, ...]) -> None:
        """Read what is not given.

        Args:
            cpuinfo: File with the processor's vendor and features.
            given: Values of facts, by name.
        """
        self._cpuinfo = cpuinfo
        unknown = [name for name in given if not isinstance(vars(Facts).get(name), cached_property)]
        assert not unknown, unknown
        vars(self).update(given)

    @cached_property
    def prefers_mkl(self) -> bool:
        """True on processors on which MKL's products beat oneDNN's: MKL's own vendor's."""
        return processor_field("vendor_id", self._cpuinfo) == "GenuineIntel"

    @cached_property
    def bfloat16_products(self) -> bool:
        """True if the processor multiplies bfloat16 itself, or if its features are unknown."""
        return self._has_any(_BFLOAT16_FEATURES)

    @cached_property
    def float16_products(self) -> bool:
        """True if the processor multiplies float16 itself, or if its features are unknown."""
        return self._has_any(_FLOAT16_FEATURES)

    @cached_property
    def mkl(self) -> bool:
        """True if torch's BLAS is MKL."""
        import torch

        return bool(torch.backends.mkl.is_available())

    @cached_property
    def onednn(self) -> bool:
        """True if this build of torch has oneDNN's product."""
        import torch

        mkldnn = torch.backends.mkldnn
        return bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    @cached_property
    def onednn_bfloat16(self) -> bool:
        """True if oneDNN's product takes bfloat16 on this processor, emulated or not."""
        import torch

        return self.onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001

    @cached_property
    def instructions(self) -> tuple[str, ...]:
        """Instruction sets for which `lmcore_cpu._kernels` has kernels here, the fastest first."""
        from lmcore_cpu.kernel import native

        found = native.module()
        return () if found is None else tuple(found.blocks())

    @property
    def matrix_units(self) -> bool:
        """True if there are kernels for the processor's matrix units, which take bfloat16."""
        return "amx" in self.instructions

    def attends_sequences(self, dtype: str) -> bool:
        """Return True if there are kernels for attention of whole sequences in a dtype."""
        sets = {"bfloat16": {"amx", "avx512_bf16"}, "float32": {"amx", "avx512_bf16", "avx512"}}
        return not sets.get(dtype, set()).isdisjoint(self.instructions[:1])

    @property
    def kernels(self) -> Kernels | None:
        """The functions of `lmcore_cpu._kernels`; None if none is for this processor."""
        from lmcore_cpu.kernel import native

        return native.module() if self.instructions else None

    @property
    def blas_is_faster(self) -> bool:
        """True if torch's BLAS is MKL, and beats oneDNN's product on this processor."""
        return self.mkl and self.prefers_mkl

    def _has_any(self, wanted: frozenset[str]) -> bool:
        """Return True if the processor has one of the features, or if these are unknown."""
        features = processor_field("flags", self._cpuinfo)
        features = features or processor_field("Features", self._cpuinfo)
        return not features or not wanted.isdisjoint(features.split())


_here = Facts()


def facts() -> Facts:
    """Return the facts of this host."""
    return _here
