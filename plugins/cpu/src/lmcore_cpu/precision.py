"""Precisions for which this host's processor has no instructions."""

from __future__ import annotations

from lmcore_cpu.kernel.processor import facts

__all__ = ["faster_precision", "half_precisions", "slow_precision"]

_LEAST_GAIN = 1.25
"""Least ratio of the products' speeds to name: a step has parts that gain nothing."""


def half_precisions() -> dict[str, bool]:
    """Return the dtype of each half precision: True if the processor has instructions for it."""
    here = facts()
    return {"bfloat16": here.bfloat16_products, "float16": here.float16_products}


def slow_precision(precision: str | None) -> str | None:
    """Return a warning if the products of a precision are slow here; None otherwise.

    Args:
        precision: Value of `--precision`; None for the default.
    """
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(precision or "", "")
    if half_precisions().get(dtype, True):
        return None
    return (
        f"this processor has no instructions for products in {dtype}: `--precision {precision}` is "
        "likely to be slower than `--precision fp32`, the default here"
    )


def faster_precision(precision: str | None, peak_seconds: float) -> str | None:
    """Return a line about bf16 if its products are faster here than the default's; None otherwise.

    Args:
        precision: Value of `--precision`; None for the default.
        peak_seconds: Longest time to measure; 0: do not.
    """
    if precision is not None or not peak_seconds or not facts().bfloat16_products:
        return None
    from lmcore_cpu.device import create_device
    from lmcore_cpu.settings import CpuSection

    peak = create_device(CpuSection(peak_seconds=peak_seconds)).require("peak_flops")
    gain = peak("bfloat16") / peak("float32")
    if gain < _LEAST_GAIN:
        return None
    return (
        f"products in bfloat16 are {gain:.1f} times as fast as in float32 on this processor: "
        "`--precision bf16` trains faster"
    )
