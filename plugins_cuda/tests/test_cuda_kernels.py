"""The other kernels against the references in float64, gradients included, on CPU tensors.

torch's own run for real; kernels of packages call stand-ins with the packages' signatures.  Shapes:
B batch, S sequence, H hidden, T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.contract import OP_SPECS, OpTable
from lmcore.contract.op import reference
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore_cuda.kernel.rules import Gpu
from lmcore_cuda.kernels import kernels_for

_SPEC = importlib.util.spec_from_file_location(
    "kernel_cases", Path(__file__).parents[2] / "tests/unit/contract/kernel_cases.py"
)
kernel_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_cases)
arguments, cast, compare = kernel_cases.arguments, kernel_cases.cast, kernel_cases.compare
compare_updates, draw = kernel_cases.compare_updates, kernel_cases.draw
state, HOW = kernel_cases.state, kernel_cases.HOW


@pytest.fixture(params=["apex", "apex-extensions"])
def apex(request: pytest.FixtureRequest, install: Any) -> Any:
    install(request.param)
    return importlib.import_module("lmcore_cuda.kernel.apex")


def test_apex_adamw(apex: Any) -> None:
    """The update by apex is the reference's; weights of equal counts go in one call."""
    compare_updates(apex.AdamW())
    calls = apex.amp_C.calls
    assert calls == ["adam 4 2", "adam 1 1", "adam 5 2", "adam 2 1", "adam 6 2", "adam 3 1"]


def test_apex_reads_counts_once(apex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks the device for counts in the first step, and again after somebody set them."""
    reads: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(
        apex.torch, "stack", lambda tensors: reads.append(len(tensors)) or stack(tensors)
    )
    update, tensors = apex.AdamW(), state()
    update(*tensors, **HOW)
    update(*tensors, **HOW)
    assert reads == [3]
    tensors[4][0].fill_(100)  # a checkpoint is loaded
    update(*tensors, **HOW)
    assert reads == [3, 1]
    assert "adam 101 1" in apex.amp_C.calls
    update([], [], [], [], [], **HOW)


def test_apex_layouts(apex: Any) -> None:
    """Weights of any layout are updated; tensors without elements are left out."""
    mine, right = state(), state()
    for tensors in (mine[0], mine[2], mine[3]):
        tensors[2] = tensors[2].t().contiguous().t()
    for lists in (mine, right):
        for tensors in lists[:4]:
            tensors.append(torch.zeros(0, 6))
        lists[4].append(torch.tensor(5.0))
    apex.AdamW()(*mine, **HOW)
    reference.adamw(*right, **HOW)
    for found, expected in zip(mine, right, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    grads = [draw(7), torch.zeros(0)]
    torch.testing.assert_close(apex.grad_norm(grads), grads[0].norm())
    assert apex.grad_norm(grads[1:]).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apex_grad_norm(apex: Any, dtype: torch.dtype) -> None:
    """The norm is a float32 scalar over all tensors, of any dtype and layout."""
    grads = [draw(300, 70).to(dtype).t(), draw(5)]
    found = apex.grad_norm(grads)
    assert found.shape == ()
    assert found.dtype == torch.float32
    expected = reference.grad_norm([grad.double() for grad in grads])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert apex.grad_norm([]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_apex_norms(apex: Any, op: str, dtype: torch.dtype) -> None:
    """Norms by apex keep the input's dtype, with gains of the same dtype or wider ones."""
    compare(op, getattr(apex, op), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_transformer_engine_norms(op: str, dtype: torch.dtype, install: Any) -> None:
    """Transformer Engine gets rows of the gain's dtype, and its result the input's again."""
    install("transformer-engine")
    module = importlib.import_module("lmcore_cuda.kernel.transformer_engine")
    compare(op, getattr(module, op), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op", ["layer_norm", "rms_norm", "swiglu", "cross_entropy", "linear_cross_entropy"]
)
def test_liger(op: str, dtype: torch.dtype, install: Any) -> None:
    """liger-kernel's functions are called so that they mean what the op means."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernel.liger")
    compare(op, getattr(module, op), dtype)


def test_liger_leaves_logits_alone(install: Any) -> None:
    """The kernel that writes over its input gets a copy."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernel.liger")
    logits = draw(12, 50)
    before = logits.clone()
    module.cross_entropy(logits.requires_grad_(), torch.arange(12)).sum().backward()
    assert torch.equal(logits, before)


def test_liger_leaves_gradients_alone(install: Any) -> None:
    """A gradient that a norm is given is not written over: others read it too."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernel.liger")
    x = draw(4, 32).requires_grad_()
    out = module.rms_norm(x, torch.ones(32), 1e-5)
    grad = torch.ones_like(out)
    out.backward(grad)
    assert torch.equal(grad, torch.ones_like(out))


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_of_them(*, masked: bool) -> None:
    """A model bound to them has the loss and the gradients of one that is bound to references."""
    table = OpTable(
        OP_SPECS,
        [kernel for kernel in kernels_for(Gpu((9, 0), {})) if kernel.id != "flex"],
        device_plugin="cuda",
    )
    shape = ModelShape(2, 32, 4, 64, 16, 64)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(16) // 6).expand(2, -1) if masked else None
    found = []
    for ops in (table, OpTable(OP_SPECS)):
        model = GPT(shape, OpBinding(ops, "cuda", "float32"), masked=masked)
        model.initialize(1)
        loss = model.loss(tokens, tokens.roll(-1), torch.ones(2, 16), documents_BS=documents)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for tensor, right in zip(*found, strict=True):
        torch.testing.assert_close(tensor, right, atol=1e-4, rtol=1e-4)
    chosen = {resolution.op: resolution.chosen for resolution in table.resolutions}
    assert chosen == {
        "attention": "sdpa",
        "layer_norm": "torch",
        "linear": "cublas",
        "bias_gelu": "torch",
        "bias_dropout_add": "torch",
        "linear_cross_entropy": "reference",
    }
