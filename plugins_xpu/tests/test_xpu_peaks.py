"""Peak rates by the names that torch gives GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore_xpu.peaks import PEAKS, has_tf32, peak_flops

PAGE = Path(__file__).parents[2] / "docs/reference/xpu.md"
_MAX_1550 = "Intel(R) Data Center GPU Max 1550"


@pytest.mark.parametrize(
    "name, dtype, teraflops",
    [
        (_MAX_1550, "bfloat16", 838.9),
        (_MAX_1550, "float16", 838.9),
        (_MAX_1550, "float32", 52.4),
        (_MAX_1550, "float64", 52.4),
        (_MAX_1550, "float8_e4m3fn", None),
        ("Intel(R) Data Center GPU Max 1100", "bfloat16", 355.5),
        ("Intel(R) Data Center GPU Max 1100C", "bfloat16", None),
        ("Intel(R) Data Center GPU Max 1450", "bfloat16", None),
        ("Intel(R) Data Center GPU Flex 170", "float16", 128),
        ("Intel(R) Data Center GPU Flex 140", "float32", 4),
        ("Intel(R) Arc(TM) A770 Graphics", "bfloat16", 131),
        ("Intel(R) Arc(TM) A770M Graphics", "bfloat16", None),
        ("Intel(R) Arc(TM) A770 Graphics", "float64", None),
        ("Intel(R) Arc(TM) B580 Graphics", "bfloat16", 116.5),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "bfloat16", 98.5),
        ("Intel(R) Arc(TM) Graphics", "bfloat16", None),
        ("Intel(R) Graphics [0x7d45]", "float32", None),
    ],
)
def test_peaks_are_those_of_the_product_pages(name, dtype, teraflops):
    """Names are matched by whole words; laptops' and unknown GPUs have no figure."""
    found = peak_flops(name, dtype)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


@pytest.mark.parametrize(
    "execution_units, teraflops", [(1024, 838.9), (512, 419.45), (448, 367.0), (896, 734.0)]
)
def test_a_tile_has_the_share_of_its_execution_units(execution_units, teraflops):
    """Half of a Max 1550 for one of two tiles; on Aurora 448 of 512 are on, in each tile."""
    found = peak_flops(_MAX_1550, "bfloat16", execution_units=execution_units)
    assert found == pytest.approx(teraflops * 1e12, rel=1e-3)


def test_tf32_counts_where_it_is_used():
    """With TF32 allowed, float32's peak is the peak of the matrix engines, if they have it."""
    assert peak_flops(_MAX_1550, "float32", tf32=True) == pytest.approx(419.4e12)
    assert peak_flops(_MAX_1550, "bfloat16", tf32=True) == pytest.approx(838.9e12)
    arc = "Intel(R) Arc(TM) A770 Graphics"
    assert peak_flops(arc, "float32", tf32=True) == peak_flops(arc, "float32")
    assert (has_tf32(_MAX_1550), has_tf32(arc), has_tf32("Intel(R) Arc(TM) Graphics")) == (
        True, False, None
    )  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_figures_fit_the_architecture(name):
    """Matrix engines are 8 to 16 times the vector engines; TF32 is half of half precision."""
    peak = PEAKS[name]
    assert 6 <= peak.half / peak.float32 <= 17
    assert peak.tf32 is None or peak.tf32 == pytest.approx(peak.half / 2, rel=0.01)
    assert peak.execution_units % 8 == 0


def test_the_page_lists_every_peak():
    """The table of the documentation is the one of the code."""
    text = PAGE.read_text(encoding="utf-8").partition("## Peak rates")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    listed = {row[0]: row[1:6] for row in rows if row[0] in PEAKS}
    wanted = {
        name: [
            f"{rate:g}" if rate is not None else "-"
            for rate in (peak.execution_units, peak.float32, peak.tf32, peak.half, peak.float64)
        ]
        for name, peak in PEAKS.items()
    }
    assert listed == wanted
