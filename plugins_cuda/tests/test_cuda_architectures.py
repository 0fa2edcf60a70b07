"""GPU architectures of a torch build: the list in its library, and compatibility."""

from __future__ import annotations

import pytest

from lmcore_cuda.detection.architectures import PYTORCH_BUILDS, read_architectures, runs_on


@pytest.mark.parametrize(
    "text, expected",
    [
        (b"\0sm_75 sm_80 sm_90a compute_120\0", "sm_75 sm_80 sm_90a compute_120"),
        (b"\0compute_90\0no sm_70 here\0compute_80 sm_90\0", "compute_80 sm_90"),
        (b"\0sm_90\0", "sm_90"),
        (b"\0built for sm_90 or so\0", ""),
        (b"nothing", ""),
        (b"", ""),
    ],
)
def test_the_list_is_read_from_the_library(tmp_path, text, expected):
    """One string of nothing but architectures, wherever it lies; nothing where there is none."""
    library = tmp_path / "libtorch_python.so"
    library.write_bytes(text and b"\x7fELF" * 1000 + text + b"sm_1" * 100)
    assert " ".join(read_architectures(library)) == expected
    assert read_architectures(tmp_path / "missing.so") == ()


@pytest.mark.parametrize(
    "capability, built, expected",
    [
        ((8, 0), "sm_80", True),
        ((8, 6), "sm_80", True),
        ((8, 9), "sm_75 sm_86", True),
        ((8, 0), "sm_86", False),
        ((9, 0), "sm_80 sm_86", False),
        ((9, 0), "sm_80 compute_80", True),
        ((12, 1), "sm_120", True),
        ((12, 0), "sm_90 compute_90a", False),
        ((9, 0), "sm_90a", True),
        ((10, 3), "sm_100a", False),
        ((10, 3), "sm_100f", True),
        ((7, 0), "sm_75 compute_75", False),
        ((7, 0), "nonsense", False),
    ],
)
def test_what_runs_on_what(capability, built, expected):
    """Machine code within its major number, portable code on all that is newer."""
    assert runs_on(capability, built.split()) == expected


@pytest.mark.parametrize(
    "capability, builds",
    [
        ((5, 2), {"cu126"}),
        ((7, 0), {"cu126", "cu128"}),
        ((7, 5), {"cu126", "cu128", "cu130"}),
        ((8, 9), {"cu126", "cu128", "cu130"}),
        ((9, 0), {"cu126", "cu128", "cu130"}),
        ((10, 0), {"cu128", "cu130"}),
        ((12, 0), {"cu128", "cu130"}),
        ((3, 7), set()),
    ],
)
def test_pytorchs_own_builds(capability, builds):
    """CUDA 12.6 from sm_50 to Hopper, 12.8 from Volta and 13 from Turing to Blackwell."""
    assert {name for name, built in PYTORCH_BUILDS.items() if runs_on(capability, built)} == builds
