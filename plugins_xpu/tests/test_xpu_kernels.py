"""The kernels of Intel's extension against the references in float64, gradients included.

They call stand-ins with the package's signatures.  torch's own functions are tested with the core.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

_SPEC = importlib.util.spec_from_file_location(
    "kernel_cases", Path(__file__).parents[2] / "tests/unit/accelerator/kernel_cases.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
kernel_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms_of_the_extension(op: str, dtype: torch.dtype, install: Any) -> None:
    """Rows of the gain's dtype go forward by the package and back by the op's own gradient."""
    install("extension")
    module = importlib.import_module("lmcore_xpu.kernel.ipex")
    kernel_cases.compare(op, getattr(module, op), dtype)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shared_keys_and_values(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients torch gets one for each query head, without them what there is."""
    from torch.nn import functional

    from lmcore.accelerator.op import reference
    from lmcore_xpu.kernel.attention_sdpa import attention

    seen = []
    attend = functional.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((k.shape[1], v.shape[1]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn(2, heads, 5, 8, generator=generator, requires_grad=True)
        for heads in (4, groups, groups)
    ]
    wanted = reference.attention(*values, causal=True)
    gradients = torch.autograd.grad(wanted.square().sum(), values)
    found = attention(*values, causal=True)
    torch.testing.assert_close(found, wanted)
    for result, other in zip(
        torch.autograd.grad(found.square().sum(), values), gradients, strict=True
    ):
        torch.testing.assert_close(result, other)
    with torch.no_grad():
        torch.testing.assert_close(attention(*values, causal=True), wanted)
    assert seen == [(4, 4), (groups, groups)]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_that_lie_apart(op: str, install: Any) -> None:
    """An input that is a view of another layout is brought into line first."""
    install("extension")
    module = importlib.import_module("lmcore_xpu.kernel.ipex")
    from lmcore.accelerator.op import reference

    values, _ = kernel_cases.arguments(op)
    x = values[0].transpose(0, 1)
    found = getattr(module, op)(x, *values[1:])
    torch.testing.assert_close(found, getattr(reference, op)(x, *values[1:]))
