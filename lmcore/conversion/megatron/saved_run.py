"""Layout and precision of a run of Megatron or DeepSpeed, as its checkpoint records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["saved_layout", "saved_precision"]

_ALWAYS = ("tensor", "pipeline", "data")
"""Axes that are named with a size of 1, too."""
_NAMES = {
    "tensor": ("tensor_model_parallel_size", "model_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size",),
    "data": ("data_parallel_size",),
    "context": ("context_parallel_size",),
    "stages_per_process": ("virtual_pipeline_model_parallel_size",),
}
"""Arguments that have the size of each axis of a `ParallelLayout`, over the years."""
_HALF = ("bf16", "fp16")


def saved_layout(args: Mapping[str, Any], **known: object) -> dict[str, int]:
    """Return the sizes of a run's parallel axes, by the names of `ParallelLayout`.

    Sizes that are not recorded are left out, and so are sizes of 1 of axes that few runs have.

    Args:
        args: Arguments of the run.
        **known: Sizes that are recorded elsewhere, by axis; they are taken first.
    """
    found = {}
    for axis, names in _NAMES.items():
        values = [known.get(axis), *(args.get(name) for name in names)]
        size = next((one for one in values if type(one) is int and one > 0), None)
        if size is not None and (size > 1 or axis in _ALWAYS):
            found[axis] = size
    world = args.get("world_size")
    if "data" not in found and type(world) is int and {"tensor", "pipeline"} <= found.keys():
        each = found["tensor"] * found["pipeline"] * found.get("context", 1)
        if world > 0 and world % each == 0:
            found["data"] = world // each
    return {axis: found[axis] for axis in _NAMES if axis in found}


def saved_precision(args: Mapping[str, Any]) -> str | None:
    """Return the precision of a run by lmcore's name; None if it is not recorded.

    Args:
        args: Arguments of the run.
    """
    flags = {name: args[name] for name in _HALF if type(args.get(name)) is bool}
    if not flags:
        return None
    return next((name for name, value in flags.items() if value), "fp32")
