"""Whether the blocks of a run's model are compiled: as the run says, else as the device does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.config.foreign.deepspeed_config import zero_stage

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.config.plan import RunPlan

__all__ = ["FACT", "compiles_blocks"]

FACT = "compile_pays"
"""The fact of a device that says whether a run is faster with its blocks compiled."""


def compiles_blocks(plan: RunPlan, device: Device) -> bool:
    """Return whether blocks are compiled: as `--compile` says, else where it pays on the device.

    Args:
        plan: The run.
        device: Its facts are asked where the run does not say.
    """
    asked = plan.config.training.compile
    if asked is not None:
        return asked
    if plan.config.parallel.engine == "deepspeed" and zero_stage(plan) == 3:
        return False  # weights come and go by hooks, which a compiled block does not run
    return device.facts.get(FACT) is True
