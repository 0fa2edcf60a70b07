"""The GPU's own settings of a run: flags `--xpu-...`, section `xpu:` of a file; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.accelerator import Device, Problem
from lmcore.config.option import option
from lmcore.config.section import Config
from lmcore_xpu.peaks import has_tf32

__all__ = ["XpuSection", "problems_of", "settings_of"]


@dataclass(frozen=True)
class XpuSection:
    """Options of Intel GPUs."""

    tf32: bool = option(
        False,
        "Let products of float32 round their inputs to TF32 (10 bits of mantissa instead of 23), "
        "on the Max series and on Xe2 and newer: several times faster, less exact.",
    )


def settings_of(config: Config) -> XpuSection:
    """Return the GPU's settings; the defaults if a program made the configuration."""
    found: XpuSection = config.plugins.get("xpu", XpuSection())
    return found


def problems_of(device: Device, config: Config) -> list[Problem]:
    """Return what of the settings this GPU cannot do."""
    if not settings_of(config).tf32 or has_tf32(device.name) is not False:
        return []
    return [
        Problem(
            "`--xpu-tf32`: this GPU has no TF32",
            why=f"`{device.name}` multiplies float32, float16 and bfloat16; TF32 is what the Max "
            "series and Xe2 (Arc B) and newer have",
            hint="leave it out",
        )
    ]
