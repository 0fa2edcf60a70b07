"""`CUDA_VISIBLE_DEVICES` as CUDA reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcore_cuda.detection.visible import visible_gpus
from lmcore_cuda.driver.nvml import Gpu

GPUS = tuple(Gpu(index, "NVIDIA H100", f"GPU-{index}abc", 80 * 2**30) for index in range(4))
PARTED = (replace(GPUS[0], mig=True, parts=("MIG-77", "MIG-78")), *GPUS[1:])


@pytest.mark.parametrize(
    "visible, indices",
    [
        ("0", [0]),
        ("3, 1", [3, 1]),
        ("GPU-2", [2]),
        ("GPU-2abc,0", [2, 0]),
        ("1,9,2", [1]),
        ("0,0", []),
        ("GPU-", []),
        ("GPU-x", []),
        ("9", []),
        ("zero", []),
        ("MIG-GPU-1abc/0/0", [1]),
        ("none", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_what_is_left(visible, indices):
    """Indices and UUIDs in order, cut at the first that fits nothing, empty with a repetition."""
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in found.gpus] == indices


@pytest.mark.parametrize("visible", ["", "-1", "none", "void", "NoDevFiles"])
def test_hiding_all_on_purpose_is_no_fault(visible):
    """The usual ways to write "no GPU" are understood."""
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": visible})
    assert (found.hidden, found.fault) == (True, "")
    assert found.evidence == f"`CUDA_VISIBLE_DEVICES={visible}` hides all 4 GPUs"


@pytest.mark.parametrize("visible", ["none", "7"])
def test_the_only_gpu_is_hidden(visible):
    """The message does not count a single GPU."""
    found = visible_gpus(GPUS[:1], {"CUDA_VISIBLE_DEVICES": visible})
    assert f"`CUDA_VISIBLE_DEVICES={visible}` hides the only GPU" in found.evidence + found.fault


@pytest.mark.parametrize(
    "visible, fault, fix",
    [
        ("7", "`7` is no GPU here", "numbers from 0 to 3"),
        ("GPU-x,1", "`GPU-x` is no GPU here", "`nvidia-smi -L`"),
        ("GPU-", "`GPU-` is the beginning of several UUIDs", "UUIDs"),
        ("2,2", "names GPU 2 twice", "name each GPU once"),
        ("2,GPU-2abc", "names GPU 2 twice", "name each GPU once"),
        ("MIG-5", "`MIG-5` is no GPU here", "UUIDs"),
    ],
)
def test_hiding_all_by_mistake_is_one(visible, fault, fix):
    """The wrong entry is named, with valid values."""
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": visible})
    assert not found.gpus
    assert not found.hidden
    assert fault in found.fault
    assert fix in found.fix


def test_a_mistake_after_a_gpu_is_reported():
    """CUDA uses the entries before it, and so does the probe."""
    found = visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": "1,9,2"})
    assert "leaves 1 of 4: `9` is no GPU here, and CUDA stops there" in found.evidence


def test_a_process_sees_one_part():
    """Of a GPU in parts the first, or the one that is named, and no whole GPU beside it."""
    for env in ({}, {"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "MIG-78,MIG-77"}):
        found = visible_gpus(PARTED, env)
        assert [gpu.index for gpu in found.gpus] == [0]
        assert "(MIG)" in found.evidence


def test_a_gpu_in_parts_without_a_part_is_a_fault_where_there_is_no_other():
    """The commands that make a part, or the GPU whole, are the fix."""
    empty = replace(GPUS[0], mig=True)
    found = visible_gpus([empty], {})
    assert "in MIG mode" in found.fault
    assert "-mig 0" in found.fix
    found = visible_gpus([empty, GPUS[1]], {})
    assert ([gpu.index for gpu in found.gpus], found.fault) == ([1], "")
    assert "1 in MIG mode" in found.evidence
