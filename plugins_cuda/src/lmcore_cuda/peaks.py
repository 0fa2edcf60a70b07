"""Peak rates of NVIDIA's GPUs, from its data sheets and white papers; torch-free.

All are dense products: without structured sparsity, which many sheets count in.  Half-precision and
float8 ones accumulate in float32, as torch's do; on GeForce cards that is half of what the sheets
print first.  docs/reference/cuda.md has the table with its sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PEAKS", "Peak", "peak_flops"]


@dataclass(frozen=True)
class Peak:
    """Rates of a GPU in 10^12 FLOP/s; None if its tensor cores lack the dtype.

    Attributes:
        float32: Without tensor cores, torch's default.
        float16: With tensor cores, accumulated in float32.
        bfloat16: The same.
        tf32: float32 rounded to TF32.
        float8: Either float8 dtype.
        source: Source of the figures.
    """

    float32: float
    float16: float | None
    bfloat16: float | None = None
    tf32: float | None = None
    float8: float | None = None
    source: str = "data sheet"


def _half(float32: float, half: float, tf32: float, float8: float | None = None) -> Peak:
    """Return the peak of a GPU whose float16 and bfloat16 are alike."""
    return Peak(float32, half, half, tf32, float8)


def _geforce(float32: float, *, float8: bool, paper: str) -> Peak:
    """Return the peak of a GeForce card; other dtypes follow from float32 in white papers."""
    half = 2 * float32
    return Peak(
        float32, half, half, float32, 4 * float32 if float8 else None, f"{paper} white paper"
    )


def _series(rates: Mapping[str, float], *, float8: bool, paper: str) -> dict[str, Peak]:
    return {
        rf"RTX {name}": _geforce(rate, float8=float8, paper=paper) for name, rate in rates.items()
    }


PEAKS: Mapping[str, Peak] = {
    "GB200": _half(80.0, 2500.0, 1250.0, 5000.0),
    "GH200": _half(66.9, 989.4, 494.7, 1978.9),
    "B200": _half(75.0, 2250.0, 1125.0, 4500.0),
    "B100": _half(60.0, 1750.0, 875.0, 3500.0),
    "H200 NVL": _half(60.0, 835.5, 417.5, 1670.5),
    "H200": _half(66.9, 989.4, 494.7, 1978.9),
    "H100 NVL": _half(60.0, 835.5, 417.5, 1670.5),
    "H100 PCIe": _half(51.2, 756.0, 378.0, 1513.0),
    "H100": _half(66.9, 989.4, 494.7, 1978.9),
    "L40S": _half(91.6, 362.05, 183.0, 733.0),
    "L40": _half(90.5, 181.05, 90.5, 362.0),
    "L4": _half(30.3, 121.0, 60.0, 242.5),
    "RTX 6000 Ada": _half(91.1, 364.2, 182.1, 728.5),
    "A100": _half(19.5, 312.0, 156.0),
    "A40": _half(37.4, 149.7, 74.8),
    "A30": _half(10.3, 165.0, 82.0),
    "A10": _half(31.2, 125.0, 62.5),
    "V100S": Peak(16.4, 130.0),
    "V100-PCIE": Peak(14.0, 112.0),
    "V100": Peak(15.7, 125.0),
    "T4": Peak(8.1, 65.0),
    **_series(
        {
            "5090": 104.8,
            "5080": 56.3,
            "5070 Ti": 43.9,
            "5070": 30.9,
        },
        float8=True,
        paper="RTX Blackwell",
    ),
    **_series(
        {
            "4090": 82.6,
            "4080 SUPER": 52.2,
            "4080": 48.7,
            "4070 Ti SUPER": 44.1,
            "4070 Ti": 40.1,
            "4070 SUPER": 35.5,
            "4070": 29.1,
            "4060 Ti": 22.1,
            "4060": 15.1,
        },
        float8=True,
        paper="Ada",
    ),
    **_series(
        {
            "3090 Ti": 40.0,
            "3090": 35.6,
            "3080 Ti": 34.1,
            "3080": 29.8,
            "3070 Ti": 21.7,
            "3070": 20.3,
            "3060 Ti": 16.2,
            "3060": 12.7,
        },
        float8=False,
        paper="GA102",
    ),
}
"""Peak rates by words of the GPU's name, longer words before their prefixes."""

_OTHERS = re.compile(r"\b(?:MIG|GRID|Laptop|Max-Q|Mobile|D)\b|-\d+[ABCQ]\b")
"""Words of the names of a GPU's parts (MIG, virtual ones) and of slower cards that share a name."""


def peak_flops(name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """Return the peak of a GPU by its name in FLOP/s; None if no figure is known.

    Args:
        name: Name of the GPU from the driver.
        dtype: Name of the dtype of the products.
        tf32: True if float32 products may be rounded to TF32.
    """
    if _OTHERS.search(name):
        return None
    for part, peak in PEAKS.items():
        if re.search(rf"\b{part}\b", name):
            rate = {
                "float32": (peak.tf32 or peak.float32) if tf32 else peak.float32,
                "float16": peak.float16,
                "bfloat16": peak.bfloat16,
                "float8_e4m3fn": peak.float8,
                "float8_e5m2": peak.float8,
            }.get(dtype)
            return rate * 1e12 if rate is not None else None
    return None
