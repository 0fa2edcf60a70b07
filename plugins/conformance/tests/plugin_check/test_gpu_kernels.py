"""The kernels of the GPUs' plugins keep version 1.0 of the contract, whatever is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import CheckStatus, OpImpl
from lmcore.contract.op.packages import Package, UsablePackages
from lmcore_conformance.contract.snapshot import describe_contract
from lmcore_conformance.plugin_check.kernels import check_kernels


def cuda_kernels() -> list[OpImpl]:
    """Return the kernels for a GPU of one generation with every package."""
    from lmcore_cuda.kernel.rules import Gpu
    from lmcore_cuda.kernels import kernels_for
    from lmcore_cuda.packages import PACKAGES

    found = {name: Package("0.8.5" if name == "liger-kernel" else "1.0", None) for name in PACKAGES}
    return list(kernels_for(Gpu((9, 0), found, lambda name: None)))


def xpu_kernels() -> list[OpImpl]:
    """Return the kernels for a GPU with every package."""
    from lmcore_xpu import kernels
    from lmcore_xpu.packages import EXTENSION, TRITON

    device: Any = SimpleNamespace(dtypes=frozenset({"float32", "float16", "bfloat16"}))
    packages = {TRITON: Package("3.7.2"), EXTENSION: Package("2.13.10+xpu")}
    usable = UsablePackages(packages, {}.get)
    return [*kernels.kernels_for(usable), *kernels.triton_kernels(device, usable)]


@pytest.mark.parametrize("device_type, kernels", [("cuda", cuda_kernels), ("xpu", xpu_kernels)])
def test_records_keep_the_contract(device_type, kernels):
    """Every record is well formed and answers for any case, also one that is left open."""
    found = kernels()
    assert found
    failed = {
        check.name: check.detail
        for check in check_kernels(found, device_type, describe_contract())
        if check.status is CheckStatus.FAILED
    }
    assert failed == {}
