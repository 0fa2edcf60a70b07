"""The device's own settings of a run: flags `--xla-...`, section `xla:` of a file; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option
from lmcore.config.section import Config
from lmcore.contract import Problem

__all__ = ["XlaSection", "problems_of", "settings_of"]


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


def problems_of(config: Config, processes: int) -> list[Problem]:
    """Return what the device cannot run of a configuration, with a number of processes."""
    parallel = config.parallel
    if processes == 1 or not (parallel.zero_stage or parallel.use_distributed_optimizer):
        return []
    return [
        Problem(
            "ZeRO is not available on PJRT devices",
            why="it is torch's FSDP, which needs streams and process groups of a DeviceMesh, and "
            "torch has neither for `xla`",
            hint="leave `--zero-stage` and `--use-distributed-optimizer` out; "
            "`--tensor-model-parallel-size` and `--pipeline-model-parallel-size` divide a model",
        )
    ]
