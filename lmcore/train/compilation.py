"""Choice of compiled or eager blocks, by `--compile` or by what pays on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.config.foreign.deepspeed_config import zero_stage

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.config.plan import RunPlan

__all__ = ["FACT", "compiles_blocks"]

FACT = "compile_pays"
"""Name of the device fact that is True if a run is faster with compiled blocks."""


def compiles_blocks(plan: RunPlan, device: Device) -> bool:
    """Return True if the blocks of the model are compiled.

    Args:
        plan: The run; `--compile` and `--no-compile` decide if given.
        device: Device of the run; its facts decide otherwise.
    """
    asked = plan.config.training.compile
    if asked is not None:
        return asked
    if plan.config.parallel.engine == "deepspeed" and zero_stage(plan) == 3:
        return False  # hooks gather and free the weights, and a compiled block runs no hooks
    return device.facts.get(FACT) is True
