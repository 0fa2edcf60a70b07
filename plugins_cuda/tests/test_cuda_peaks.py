"""Peak rates by the names that the driver gives GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore_cuda.peaks import PEAKS, peak_flops

PAGE = Path(__file__).parents[2] / "docs/reference/cuda.md"


@pytest.mark.parametrize(
    "name, dtype, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float8_e4m3fn", 1670.5),
        ("NVIDIA H200", "float8_e4m3fn", 1978.9),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100 80GB PCIe", "float16", 312),
        ("NVIDIA A100-SXM4-80GB", "float8_e4m3fn", None),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA L40S", "float16", 362.05),
        ("NVIDIA L40", "float16", 181.05),
        ("NVIDIA L4", "float16", 121),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 364.2),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100S-PCIE-32GB", "float32", 16.4),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 4090", "float8_e4m3fn", 330.4),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "float32", 44.1),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71.2),
        ("NVIDIA GeForce RTX 3090", "float8_e4m3fn", None),
        ("NVIDIA GeForce RTX 5090", "float16", 209.6),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA A10-24Q", "bfloat16", None),
        ("GRID A100D-8C", "bfloat16", None),
        ("NVIDIA H100 PCIe", "float64", None),
        ("NVIDIA GeForce GTX 1080", "float32", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, dtype, teraflops):
    """Names are matched by whole words; parts, laptops and unknown GPUs have no figure."""
    found = peak_flops(name, dtype)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_tf32_counts_where_it_is_used():
    """With TF32 allowed, float32's peak is the peak of its tensor cores, if there are any."""
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32", tf32=True) == pytest.approx(494.7e12)
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16", tf32=True) == pytest.approx(989.4e12)
    assert peak_flops("Tesla T4", "float32", tf32=True) == pytest.approx(8.1e12)


def test_a_longer_name_comes_before_its_prefix():
    """Else an "RTX 4070 Ti" would be taken for an "RTX 4070"."""
    names = list(PEAKS)
    for place, name in enumerate(names):
        for later in names[place + 1 :]:
            assert not re.search(rf"\b{name}\b", later), (name, later)


@pytest.mark.parametrize("name", PEAKS)
def test_faster_dtypes_are_faster(name):
    """float8 beats half precision, which beats TF32 and float32."""
    peak = PEAKS[name]
    rates = [peak.float8, peak.float16, peak.tf32, peak.float32]
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known, reverse=True)


def test_the_page_lists_every_peak():
    """The table of the documentation is the one of the code."""
    text = PAGE.read_text(encoding="utf-8").partition("## Peak rates")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    listed = {row[0]: row[1:6] for row in rows if row[0] in PEAKS}
    wanted = {
        name: [
            f"{rate:g}" if rate is not None else "-"
            for rate in (peak.float32, peak.tf32, peak.bfloat16, peak.float16, peak.float8)
        ]
        for name, peak in PEAKS.items()
    }
    assert listed == wanted
