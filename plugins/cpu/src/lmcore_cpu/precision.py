"""Precisions for which this host's processor has no instructions."""

from __future__ import annotations

from lmcore_cpu.kernel.processor import facts

__all__ = ["half_precisions", "slow_precision"]


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
