"""The device's own settings of a run: flags `--xla-...`, section `xla:` of a file; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option
from lmcore.config.section import Config

__all__ = ["XlaSection", "settings_of"]


@dataclass(frozen=True)
class XlaSection:
    """Options of PJRT devices."""

    matmul_precision: str = option(
        "highest",
        "Precision of float32 products on a TPU, which multiplies bfloat16 numbers: `highest` adds "
        "six products of bfloat16 for float32's precision, `high` three, `default` takes one, "
        "several times faster and less exact.",
        choices=("highest", "high", "default"),
    )


def settings_of(config: Config) -> XlaSection:
    """Return the device's settings; the defaults if a program made the configuration."""
    found: XlaSection = config.plugins.get("xla", XlaSection())
    return found
