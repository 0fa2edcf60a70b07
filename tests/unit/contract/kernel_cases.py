"""Arguments of ops, and comparisons of kernels with the references in float64, gradients included.

Loaded by path: by the tests here, and by tests of plugins.  Shapes: B batch, S sequence or queries,
H hidden, T tokens or keys, V vocabulary, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmcore.contract import OP_SPECS
from lmcore.contract.op import reference
from lmcore.contract.op.signature import signature_problem

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


ATTENTION = next(spec for spec in OP_SPECS if spec.name == "attention").tolerances


def attention_inputs(
    dtype: torch.dtype, heads: int = 4, shared: int = 4, queries: int = 160, keys: int = 160
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as the model makes them: views of one tensor, heads beside each other."""
    generator = torch.Generator().manual_seed(queries * keys + shared)

    def draw(length: int, count: int) -> Tensor:
        return torch.randn(2, length, count, 16, generator=generator).to(dtype).transpose(1, 2)

    return draw(queries, heads), draw(keys, shared), draw(keys, shared)


def documents(length: int = 160) -> Tensor:
    """Return the mask of three documents in each sample, [B, 1, S, S]; True hides."""
    ends = torch.tensor([[20, 100], [64, 128]])
    number_BS = (torch.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return number_BS[:, None, :, None] != number_BS[:, None, None, :]


def with_gradients(
    kernel: Callable[..., Tensor], qkv: tuple[Tensor, ...], **how: Any
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = kernel(*leaves, **how)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    (out.double() * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare_attention(kernel: Callable[..., Tensor], qkv: tuple[Tensor, ...], **how: Any) -> None:
    """Hold output and gradients of *kernel* to the op's tolerance."""
    assert signature_problem(kernel, reference.attention) is None
    found = with_gradients(kernel, qkv, **how)
    expected = with_gradients(reference.attention, tuple(x.double() for x in qkv), **how)
    allowed = ATTENTION[str(qkv[0].dtype).removeprefix("torch.")]
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == qkv[0].dtype
        limit = allowed.absolute * max(1.0, right.abs().max().item())
        torch.testing.assert_close(mine.double(), right, atol=limit, rtol=allowed.relative)
