"""The GPU's own settings of a run: flags `--cuda-...`, section `cuda:` of a file; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.accelerator import Device, Problem
from lmcore.config.option import option
from lmcore.config.section import Config

__all__ = ["CudaSection", "problems_of", "settings_of"]

_AMPERE = 8
"""Major compute capability of the first GPUs with TF32."""


@dataclass(frozen=True)
class CudaSection:
    """Options of NVIDIA GPUs."""

    tf32: bool = option(
        False,
        "Let products of float32 round their inputs to TF32 (10 bits of mantissa instead of 23), "
        "on GPUs of compute capability 8.0 and newer: several times faster, less exact.",
    )


def settings_of(config: Config) -> CudaSection:
    """Return the GPU's settings; the defaults if a program made the configuration."""
    found: CudaSection = config.plugins.get("cuda", CudaSection())
    return found


def problems_of(device: Device, config: Config) -> list[Problem]:
    """Return the settings that this GPU does not support."""
    capability = str(device.facts.get("capability", ""))
    if not settings_of(config).tf32 or int(capability.partition(".")[0] or "8") >= _AMPERE:
        return []
    return [
        Problem(
            "`--cuda-tf32`: this GPU has no TF32",
            why=f"`{device.name}` has compute capability {capability}; TF32 came with 8.0",
            hint="leave it out",
        )
    ]
