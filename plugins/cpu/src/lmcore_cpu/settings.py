"""The CPU's own settings of a run: flags `--cpu-...`, section `cpu:` of a file; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import FREE, option
from lmcore.config.section import Config

__all__ = ["SPIN_COUNT", "CpuSection", "settings_of"]

SPIN_COUNT = "2000"
"""Polls of a waiting OpenMP thread before it yields its core: GOMP_SPINCOUNT."""


@dataclass(frozen=True)
class CpuSection:
    """Options of the CPU."""

    keep_freed_memory: bool = option(
        True,
        "Keep freed memory for the next step; off, it goes back to the system, and each step's "
        "large tensors are mapped again.",
        on_resume=FREE,
    )
    peak_seconds: float = option(
        0.5,
        "Longest time to measure the host's peak, for each kind of product; 0: no peak, no MFU.",
        minimum=0,
        maximum=60,
        on_resume=FREE,
    )


def settings_of(config: Config) -> CpuSection:
    """Return the CPU's settings; the defaults if a program made the configuration."""
    found: CpuSection = config.plugins.get("cpu", CpuSection())
    return found
