"""Peak rates of TPUs, as Google publishes them for one chip."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["peak_flops"]

_BFLOAT16 = {
    "TPU v2": 22.5e12,  # of one core; a chip of v2 and v3 is two devices
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""FLOP/s of dense products, by PJRT's name of the device."""


def peak_flops(name: str) -> Callable[[str], float | None] | None:
    """Return the device's function of peak rates; None if the device is not in the table.

    There is no figure for float32, which a TPU composes of products of bfloat16.
    """
    rate = _BFLOAT16.get(name)
    if rate is None:
        return None
    return lambda dtype: rate if dtype == "bfloat16" else None
