"""The other kernels against the references in float64, gradients included, on CPU tensors.

torch's own run for real; those of packages call stand-ins with the packages' signatures.  Shapes:
B batch, S sequence, H hidden, T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.accelerator import OP_SPECS, OpTable, reference
from lmcore.accelerator.op_signature import signature_problem
from lmcore.model.gpt import GPT
from lmcore.model.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore_cuda import kernels_torch
from lmcore_cuda.kernels import kernels_for
from lmcore_cuda.kernels_rules import Gpu

SPECS = {spec.name: spec for spec in OP_SPECS}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def arguments(op: str) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of an op; weights stay in float32 whatever the activations are in."""
    x, w, b = draw(2, 6, 32), 1 + 0.1 * draw(32, seed=1), draw(32, seed=2)
    angles = draw(6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    mask[3] = True  # a row that is hidden whole
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "layer_norm": ([x, w, b, 1e-5], {}),
        "rms_norm": ([x, w, 1e-5], {}),
        "linear": ([x, draw(16, 32), draw(16)], {}),
        "bias_gelu": ([x, b], {}),
        "swiglu": ([x], {}),
        "bias_dropout_add": ([x, b, draw(2, 6, 32, seed=3)], {"dropout": 0.0, "training": True}),
        "scaled_masked_softmax": ([draw(2, 4, 6, 6), mask, 0.3], {}),
        "rotary_embedding": ([draw(2, 4, 6, 20), angles.cos(), angles.sin()], {}),
        "cross_entropy": ([draw(12, 50), torch.arange(12)], {}),
        "linear_cross_entropy": (
            [draw(12, 32), draw(50, 32), torch.arange(12), torch.linspace(0, 1, 12)],
            {},
        ),
    }
    return cases[op]


WEIGHTS = {"weight_H", "bias_H", "bias_F", "weight_OI", "bias_O", "loss_weight_T", "weight_VH"}


def cast(op: str, values: Sequence[Any], dtype: torch.dtype, *, all_of: bool = False) -> list[Any]:
    """Return the arguments with activations in *dtype*."""
    names = SPECS[op].schema.partition("(")[2].partition(")")[0].replace(" ", "").split(",")
    return [
        value.to(dtype)
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and (all_of or name not in WEIGHTS)
        else value
        for name, value in zip(names, values, strict=False)
    ]


def run(function: Callable[..., Tensor], values: Sequence[Any], how: dict[str, Any]) -> list[Any]:
    leaves = [
        value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in values
    ]
    out = function(*leaves, **how)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    (out.double() * weights).sum().backward()
    return [out.detach(), *(getattr(leaf, "grad", None) for leaf in leaves)]


def compare(op: str, function: Callable[..., Tensor], dtype: torch.dtype, **further: Any) -> None:
    """Hold output and gradients to the op's tolerance, and the output to its dtype."""
    ours = getattr(reference, op)
    assert signature_problem(function, ours) is None
    values, how = arguments(op)
    values, how = cast(op, values, dtype), {**how, **further}
    if op.startswith("linear"):  # a product's factors are of one dtype, as autocast makes them
        values = cast(op, values, dtype, all_of=True)
    found = run(function, values, how)
    expected = run(ours, cast(op, values, torch.float64, all_of=True), how)
    allowed = SPECS[op].tolerances[str(dtype).removeprefix("torch.")]
    assert found[0].dtype == run(ours, values, how)[0].dtype
    wanted = [True, *(name in SPECS[op].gradients for name in _names(op, len(values)))]
    for mine, right, counts in zip(found, expected, wanted, strict=True):
        if counts:
            limit = allowed.absolute * max(1.0, right.abs().max().item())
            torch.testing.assert_close(mine.double(), right, atol=limit, rtol=allowed.relative)


def _names(op: str, count: int) -> list[str]:
    names = SPECS[op].schema.partition("(")[2].partition(")")[0].replace(" ", "").split(",")
    return names[:count]


TORCH = [
    "layer_norm",
    "rms_norm",
    "linear",
    "bias_gelu",
    "swiglu",
    "bias_dropout_add",
    "scaled_masked_softmax",
    "rotary_embedding",
    "cross_entropy",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", TORCH)
def test_torch(op: str, dtype: torch.dtype) -> None:
    """Kernels of torch's own mean what the references mean, gains in float32 or not."""
    compare(op, getattr(kernels_torch, op), dtype)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_autocast_does_not_change_a_norm_s_dtype(op: str) -> None:
    """Under autocast a norm still gives the dtype that it was given."""
    values, _ = arguments(op)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = getattr(kernels_torch, op)(*cast(op, values, dtype))
        assert out.dtype == dtype


def test_dropout_and_no_bias() -> None:
    """Dropped elements leave the residual; without a bias nothing is added."""
    x, residual = torch.ones(200, 200), torch.zeros(200, 200)
    torch.manual_seed(0)
    out = kernels_torch.bias_dropout_add(x, None, residual, dropout=0.25, training=True)
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((out == 0).float().mean() - 0.25) < 0.02
    out = kernels_torch.bias_dropout_add(x, None, residual, dropout=0.25, training=False)
    assert torch.equal(out, x)


def state(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return weights, gradients, moments and counts of three tensors, one of another layout."""
    sizes = [(7,), (5, 3), (4, 6)]
    params = [draw(*size).to(dtype) for size in sizes]
    grads = [draw(*size, seed=1).to(dtype) for size in sizes]
    grads[2] = grads[2].t().contiguous().t()
    firsts = [0.1 * draw(*size, seed=2).to(dtype) for size in sizes]
    seconds = [draw(*size, seed=3).to(dtype).square() for size in sizes]
    return [
        params,
        grads,
        firsts,
        seconds,
        [torch.tensor(3.0), torch.tensor(3.0), torch.tensor(0.0)],
    ]


HOW = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def compare_updates(update: Callable[..., None], steps: int = 3) -> None:
    assert signature_problem(update, reference.adamw) is None
    mine = state()
    right = [[x.double() for x in part] for part in mine[:4]] + [[x.clone() for x in mine[4]]]
    for _ in range(steps):
        update(*mine, **HOW)
        reference.adamw(*right, **HOW)
    for found, expected in zip(mine, right, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other.double(), atol=2e-6, rtol=1e-5)
    assert [int(count) for count in mine[4]] == [3 + steps, 3 + steps, steps]


def test_torch_adamw() -> None:
    """The update by torch is the reference's over several steps, with counts that differ."""
    compare_updates(kernels_torch.adamw)


def test_torch_adamw_of_half_weights() -> None:
    """Weights in bfloat16 with gradients in float32 are brought to one type first."""
    params, grads, firsts, seconds, counts = state(torch.bfloat16)
    kernels_torch.adamw(params, [one.float() for one in grads], firsts, seconds, counts, **HOW)
    assert all(one.dtype == torch.bfloat16 for one in params)
    assert [int(count) for count in counts] == [4, 4, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_grad_norm(dtype: torch.dtype) -> None:
    """The norm over a list is that of all its numbers, in at least float32; of none it is 0."""
    grads = [draw(300, 70).to(dtype), draw(5).to(dtype)]
    found = kernels_torch.grad_norm(grads)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        found.double(), reference.grad_norm([one.double() for one in grads]), rtol=1e-5, atol=0
    )
    assert kernels_torch.grad_norm([]) == 0


@pytest.fixture
def apex(install: Any) -> Any:
    install("apex")
    module = importlib.import_module("lmcore_cuda.apex_kernels")
    sys.modules["amp_C"].calls.clear()
    return module


def test_apex_adamw(apex: Any) -> None:
    """The update by apex is the reference's; weights of equal counts go in one call."""
    compare_updates(apex.AdamW())
    calls = sys.modules["amp_C"].calls
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
    assert "adam 101 1" in sys.modules["amp_C"].calls
    update([], [], [], [], [], **HOW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apex_grad_norm(apex: Any, dtype: torch.dtype) -> None:
    """The norm is a float32 scalar over all tensors, those of other dtypes and layouts too."""
    grads = [draw(300, 70).to(dtype).t(), draw(5)]
    found = apex.grad_norm(grads)
    assert found.shape == ()
    assert found.dtype == torch.float32
    expected = reference.grad_norm([one.double() for one in grads])
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
    module = importlib.import_module("lmcore_cuda.kernels_transformer_engine")
    compare(op, getattr(module, op), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op", ["layer_norm", "rms_norm", "swiglu", "cross_entropy", "linear_cross_entropy"]
)
def test_liger(op: str, dtype: torch.dtype, install: Any) -> None:
    """liger-kernel's functions are called so that they mean what the op means."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernels_liger")
    compare(op, getattr(module, op), dtype)


def test_liger_leaves_scores_alone(install: Any) -> None:
    """The kernel that writes over its input gets a copy."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernels_liger")
    logits = draw(12, 50)
    before = logits.clone()
    module.cross_entropy(logits.requires_grad_(), torch.arange(12)).sum().backward()
    assert torch.equal(logits, before)


def test_liger_leaves_gradients_alone(install: Any) -> None:
    """A gradient that a norm is given is not written over: others read it too."""
    install("liger-kernel")
    module = importlib.import_module("lmcore_cuda.kernels_liger")
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
        [one for one in kernels_for(Gpu((9, 0), {})) if one.id != "flex"],
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
        found.append([loss.detach(), *(one.grad for one in model.parameters())])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)
    chosen = {one.op: one.chosen for one in table.resolutions}
    assert chosen == {
        "attention": "sdpa",
        "layer_norm": "torch",
        "linear": "cublas",
        "bias_gelu": "torch",
        "bias_dropout_add": "torch",
        "linear_cross_entropy": "reference",
    }
