"""The GPU's own settings of a run: flags `--xpu-...`, section `xpu:` of a file; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmcore.config.option import FREE, option
from lmcore.config.section import Config
from lmcore.contract import Device, Problem
from lmcore_xpu.peaks import has_tf32

__all__ = ["XpuSection", "allocator_settings", "problems_of", "settings_of"]


_OF_ALLOCATOR = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")
"""Options that are settings of torch's allocator, by torch's names."""


@dataclass(frozen=True)
class XpuSection:
    """Options of Intel GPUs."""

    tf32: bool = option(
        False,
        "Let products of float32 round their inputs to TF32 (10 bits of mantissa instead of 23), "
        "on the Max series and on Xe2 and newer: several times faster, less exact.",
    )
    memory_fraction: float | None = option(
        None,
        "Largest share of the GPU's memory that this process may take; default: all of it.",
        above=0,
        maximum=1,
        on_resume=FREE,
    )
    expandable_segments: bool | None = option(
        None,
        "Let the allocator grow its segments, so that blocks of changing sizes leave no holes; "
        "default: PYTORCH_ALLOC_CONF, else off.",
        on_resume=FREE,
    )
    max_split_size_mb: int | None = option(
        None,
        "Largest block, in MiB, that the allocator splits; default: any.",
        minimum=21,
        on_resume=FREE,
    )
    garbage_collection_threshold: float | None = option(
        None,
        "Share of the memory above which the allocator frees unused blocks; default: never.",
        above=0,
        below=1,
        on_resume=FREE,
    )


def settings_of(config: Config) -> XpuSection:
    """Return the GPU's settings; the defaults if a program made the configuration."""
    found: XpuSection = config.plugins.get("xpu", XpuSection())
    return found


def allocator_settings(settings: XpuSection, env: Mapping[str, str]) -> str:
    """Return the settings of torch's allocator in its format; empty if no option changes them.

    Torch resets what is not given: so the settings of the environment are part of the result, and
    an option replaces the environment's value.

    Args:
        settings: Settings of the run.
        env: Environment of this process.
    """
    given = {name: getattr(settings, name) for name in _OF_ALLOCATOR}
    chosen = [f"{name}:{value}" for name, value in given.items() if value is not None]
    if not chosen:
        return ""
    text = env.get("PYTORCH_ALLOC_CONF", "")
    before = [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]
    kept = [word for word in before if given.get(word.partition(":")[0].strip()) is None]
    return ",".join([*kept, *chosen])


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
