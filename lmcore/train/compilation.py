"""Choice of compiled or eager blocks, by `--compile` or by what pays on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.model.training_engine import engine_named

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.device import Device

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
    if not engine_named(plan.config.parallel.engine).compiles(plan.config):
        return False
    return device.facts.get(FACT) is True and "compile" not in device.missing
