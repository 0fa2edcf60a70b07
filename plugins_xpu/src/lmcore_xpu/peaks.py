"""Peak rates of Intel's GPUs, from its product pages and architecture guides; torch-free.

All are dense products, for the whole card.  Half-precision rates are of the matrix engines
(XMX), which accumulate in float32.  A device has the share of its execution units in the card's:
a tile of two, or a card with some units disabled, as Aurora's.
docs/reference/xpu.md has the table with its sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PEAKS", "Peak", "has_tf32", "peak_flops"]


@dataclass(frozen=True)
class Peak:
    """Rates of a card in 10^12 FLOP/s; None where it does not have the dtype.

    Attributes:
        execution_units: Vector engines of the card, which torch calls `gpu_eu_count`.
        float32: In the vector engines, torch's default.
        half: float16 and bfloat16, in the matrix engines.
        tf32: float32 rounded to TF32, in the matrix engines.
        float64: In the vector engines.
    """

    execution_units: int
    float32: float
    half: float
    tf32: float | None = None
    float64: float | None = None


PEAKS: Mapping[str, Peak] = {
    "Max 1550": Peak(1024, 52.4, 838.9, 419.4, 52.4),
    "Max 1350": Peak(896, 44.4, 711.1, 355.5, 44.4),
    "Max 1100": Peak(448, 22.2, 355.5, 177.7, 22.2),
    "Flex 170": Peak(512, 16.0, 128.0),
    "Flex 140": Peak(128, 4.0, 26.2),
    "Arc A770": Peak(512, 17.2, 131.0),
    "Arc A750": Peak(448, 14.7, 114.5),
    "Arc A580": Peak(384, 10.4, 98.5),
    "Arc A380": Peak(128, 4.1, 33.0),
    "Arc A310": Peak(96, 3.1, 24.5),
    "Arc B580": Peak(160, 13.7, 116.5, 58.3),
    "Arc B570": Peak(144, 11.5, 101.5, 50.8),
    "Arc Pro B70": Peak(256, 22.9, 183.5, 91.8),
    "Arc Pro B65": Peak(160, 12.3, 98.5, 49.3),
    "Arc Pro B60": Peak(160, 12.3, 98.5, 49.3),
    "Arc Pro B50": Peak(128, 10.7, 85.0, 42.5),
}
"""By words of the name that torch gives, without trade marks."""

_MARKS = re.compile(r"\((?:R|TM)\)")


def peak_flops(
    name: str, dtype: str, *, execution_units: int | None = None, tf32: bool = False
) -> float | None:
    """Return the peak of a device by its name in FLOP/s; None if no figure is known.

    Args:
        name: As torch calls it: "Intel(R) Data Center GPU Max 1550".
        dtype: Name of the dtype of the products.
        execution_units: Number of units of the device; a tile has fewer than its card; None: all.
        tf32: True if products of float32 may be rounded to TF32.
    """
    peak = _peak_of(name)
    if peak is None:
        return None
    rate = {
        "float64": peak.float64,
        "float32": (peak.tf32 or peak.float32) if tf32 else peak.float32,
        "float16": peak.half,
        "bfloat16": peak.half,
    }.get(dtype)
    share = 1.0 if execution_units is None else execution_units / peak.execution_units
    return None if rate is None else rate * share * 1e12


def has_tf32(name: str) -> bool | None:
    """Return True if the device of that name multiplies TF32; None where that is not known."""
    peak = _peak_of(name)
    return None if peak is None else peak.tf32 is not None


def _peak_of(name: str) -> Peak | None:
    plain = " ".join(_MARKS.sub(" ", name).split())
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", plain)), None)
