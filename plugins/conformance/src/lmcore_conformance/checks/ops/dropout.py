"""Level 2: dropout of ops: the given share, independent draws, repeatable from the same state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore_conformance.op.call import Kernel, difference, kernels_of
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L2", group="ops")
_SIZE = (7, 41, 701)
_REPEATS = (9, 43, 5419)
"""2**21 + 1 elements: draws that begin again after 2**20 or fewer are in it twice."""
_HEADS = (27, 19, 64, 64)
"""Samples, heads, queries or keys, and channels: more than 2**21 products."""
_SQUARE = (2, 3, 16, 16)
"""Samples, heads, queries or keys, and as many channels: an output may be the weights."""
_BLOCK = 64
_KEYS = 48


def _able(bench: Bench, op: str, **attributes: object) -> list[Kernel]:
    kernels = kernels_of(bench, op)
    return [kernel for kernel in kernels if kernel.does(bench.device.type, "float32", attributes)]


def _weights(like: Tensor) -> Tensor:
    """Return 1, 2, 4, 8 in turn: products with them are exact."""
    places = torch.arange(like.numel(), device=like.device).view(like.shape)
    return (2.0 ** (places % 4)).to(like.dtype)


def _added(
    bench: Bench, kernel: Kernel, dropout: float, size: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a branch of ones to a residual of zeros; return the sum and all gradients."""
    x = torch.full(size, 0.75, device=bench.torch_device, requires_grad=True)
    bias = torch.full(size[-1:], 0.25, device=bench.torch_device, requires_grad=True)
    residual = torch.zeros(size, device=bench.torch_device, requires_grad=True)
    out = kernel.function(x, bias, residual, dropout=dropout, training=True)
    of_x, of_bias, of_residual = torch.autograd.grad(out, [x, bias, residual], _weights(out))
    return bench.host(out), bench.host(of_x), bench.host(of_bias), bench.host(of_residual)


def _over_kernels(
    bench: Bench, op: str, judge: Callable[[Kernel], list[str]], **attributes: object
) -> str:
    faults, names = [], []
    for kernel in _able(bench, op, **attributes):
        names.append(kernel.id)
        try:
            faults += [f"`{kernel.id}`: {text}" for text in judge(kernel)]
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            faults.append(f"`{kernel.id}`: it raised {type(error).__name__}: {error}")
    return conclude(faults, ", ".join(names))


def _alike(kept_BW: Tensor) -> int:
    """Return how many rows of a mask, of 64 elements at most, another one equals."""
    places_W = torch.arange(kept_BW.shape[1])
    numbers_B = (kept_BW.long() << places_W).sum(1)
    return len(numbers_B) - len(numbers_B.unique())


@_check(
    "ops.bias_dropout_add.share",
    "It drops the given fraction, scales up the rest, and drops the same elements of the gradient.",
    reason="Training with another fraction, or with another mask in backward, is biased.",
)
def share(bench: Bench) -> str:
    """Count the dropped channels of 200,000 at several probabilities."""

    def judge(kernel: Kernel) -> list[str]:
        faults = []
        count = _SIZE[0] * _SIZE[1] * _SIZE[2]
        for dropout in (0.002, 0.1, 0.5, 0.9):
            bench.device.seed(3)
            out, grad_x, grad_bias, grad_residual = _added(bench, kernel, dropout, _SIZE)
            kept = out != 0
            deviation = (dropout * (1 - dropout) / count) ** 0.5
            found = kept.cpu().double().mean().item()
            if not abs(found - (1 - dropout)) < 5 * deviation + 1 / 65536:
                faults.append(f"at {dropout:g} it keeps {found:.4f}")
            if (out[kept] * (1 - dropout) - 1).abs().max() > 2e-3:
                faults.append(f"at {dropout:g} survivors are {out[kept].mean():.4f}")
            weights = _weights(out)
            if not torch.allclose(grad_x, out * weights, rtol=1e-6):
                faults.append(f"at {dropout:g} gradients pass elsewhere than values did")
            if not torch.equal(grad_residual, weights):
                faults.append(f"at {dropout:g} the residual's gradient is changed")
            if not torch.allclose(grad_bias, grad_x.sum((0, 1)), rtol=1e-4):
                faults.append(f"at {dropout:g} the bias's gradient is not the sum of the branch's")
        return faults

    return _over_kernels(bench, "bias_dropout_add", judge, dropout=0.1, bias=True)


@_check(
    "ops.bias_dropout_add.independent",
    "Channels are dropped independently of their neighbours, at every distance, and no draws repeat"
    " in a call of 2^21 elements.",
    reason="A kernel that shares draws among channels drops whole patterns.",
)
def independent(bench: Bench) -> str:
    """Correlate the mask with itself, moved; look for equal blocks in a larger one."""

    def judge(kernel: Kernel) -> list[str]:
        bench.device.seed(4)
        kept = (_added(bench, kernel, 0.5, (8, 64, 512))[0] != 0).cpu().double().flatten() - 0.5
        faults = []
        for distance in (1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 512, 32768):
            together = (kept[:-distance] * kept[distance:]).mean().item() * 4
            if not abs(together) < 5 / (kept.numel() - distance) ** 0.5:
                faults.append(f"at distance {distance} the correlation is {together:.4f}")
        flat = (_added(bench, kernel, 0.5, _REPEATS)[0] != 0).flatten()
        blocks = flat[: flat.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
        if found := _alike(blocks):
            faults.append(
                f"in a call of {flat.numel():,} elements, {found:,} of {len(blocks):,} blocks of "
                f"{_BLOCK} drop what another block drops"
            )
        return faults

    return _over_kernels(bench, "bias_dropout_add", judge, dropout=0.5, bias=True)


@_check(
    "ops.bias_dropout_add.state",
    "The same random state drops the same channels, the next call others.",
    reason="Recomputation restores the state.",
)
def state(bench: Bench) -> str:
    """Draw twice, restore the state, draw again."""

    def judge(kernel: Kernel) -> list[str]:
        bench.device.seed(5)
        before = bench.device.get_rng_state().clone()
        first, second = (_added(bench, kernel, 0.3, (2, 3, 101))[0] for _ in range(2))
        bench.device.set_rng_state(before)
        again = _added(bench, kernel, 0.3, (2, 3, 101))[0]
        faults = [] if torch.equal(first, again) else ["a restored state drops other channels"]
        return faults + (["two calls drop the same"] if torch.equal(first, second) else [])

    return _over_kernels(bench, "bias_dropout_add", judge, dropout=0.3, bias=True)


@_check(
    "ops.bias_dropout_add.all",
    "A probability of 1 leaves the residual, without NaN.",
    reason="A careless kernel computes 0 times infinity.",
)
def everything(bench: Bench) -> str:
    """Drop everything."""

    def judge(kernel: Kernel) -> list[str]:
        out, grad_x, _, _ = _added(bench, kernel, 1.0, (2, 3, 5))
        return [] if not out.any() and not grad_x.any() else ["something is left, or NaN"]

    return _over_kernels(bench, "bias_dropout_add", judge, dropout=1.0, bias=True)


@_check(
    "ops.attention.dropout",
    "With dropout the mean over many draws is unchanged, single draws differ, also those of one "
    "call with 2^21 products, gradients pass where values did, and a restored state repeats both.",
    reason="No other check notices wrong dropout inside a fused kernel.",
)
def attention_dropout(bench: Bench) -> str:
    """Average 400 draws over values of one; compare the rows of a large call."""
    shape = (1, 1, 4, 8)
    q, k = (bench.values(*shape, seed=seed).float().to(bench.torch_device) for seed in (1, 2))
    ones = torch.ones(shape, device=bench.torch_device)

    def judge(kernel: Kernel) -> list[str]:
        bench.device.seed(0)
        draws = torch.stack(
            [bench.host(kernel.function(q, k, ones, causal=True, dropout=0.5)) for _ in range(400)]
        )
        faults = []
        if not draws.std(0).max() > 0.1:
            faults.append("all draws are the same")
        if not (draws.mean(0) - 1).abs().max() < 0.25:
            faults.append(f"the mean is {draws.mean():.3f}, not 1")
        before = bench.device.get_rng_state().clone()
        runs = []
        for _ in range(2):
            bench.device.set_rng_state(before)
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, ones)]
            out = kernel.function(*leaves, causal=True, dropout=0.5)
            runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        if not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(*runs, strict=True)):
            faults.append("a restored state gives other outputs or gradients")
        if kernel.does(bench.device.type, "float32", _attention_attributes(*_SQUARE[1:])):
            faults += _other_mask(bench, kernel)
        if kernel.does(bench.device.type, "float32", _attention_attributes(*_HEADS[1:])):
            faults += _equal_rows(bench, kernel)
        return faults

    return _over_kernels(bench, "attention", judge, **_attention_attributes(1, 4, 8))


def _attention_attributes(heads: int, length: int, channels: int) -> dict[str, object]:
    sizes = {"head_dim": channels, "num_attention_heads": heads, "num_query_groups": heads}
    return {**sizes, "seq_length": length, "causal": True, "masked": False, "dropout": 0.5}


def _other_mask(bench: Bench, kernel: Kernel) -> list[str]:
    """Return what is wrong if backward drops other attention weights than forward.

    With values of an identity matrix the output is the attention weights that were kept, so that
    the gradients of this mask can be computed in float64.
    """
    identity = torch.eye(_SQUARE[2], dtype=torch.float64).expand(_SQUARE).contiguous()
    exact = [bench.values(*_SQUARE, seed=1), bench.values(*_SQUARE, seed=2), identity]
    exact = [one.float().double().requires_grad_() for one in exact]
    leaves = [one.detach().float().to(bench.torch_device).requires_grad_() for one in exact]
    upstream = bench.values(*_SQUARE, seed=3).float()
    bench.device.seed(7)
    out = kernel.function(*leaves, causal=True, dropout=0.5)
    found = torch.autograd.grad(out, leaves, upstream.to(bench.torch_device))
    kept = bench.host(out) != 0
    scores = exact[0] @ exact[1].transpose(-1, -2) / _SQUARE[-1] ** 0.5
    hidden = torch.ones(_SQUARE[2], _SQUARE[2], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) * kept / 0.5
    right = torch.autograd.grad(weights @ exact[2], exact, upstream.double())
    return [
        f"gradients pass elsewhere than values did: that of `{name}` {wrong}"
        for name, one, other in zip(("q", "k", "v"), found, right, strict=True)
        if (wrong := difference(bench.host(one), other, "attention", "float32"))
    ][:1]


def _equal_rows(bench: Bench, kernel: Kernel) -> list[str]:
    """Return what is wrong if queries, heads or samples of one call drop the same keys."""
    zeros = torch.zeros(_HEADS, device=bench.torch_device)
    # Values of an identity matrix: channel j of the output is the probability of key j.
    values = torch.eye(_HEADS[2], device=bench.torch_device).expand(_HEADS).contiguous()
    bench.device.seed(6)
    out = bench.host(kernel.function(zeros, zeros, values, causal=True, dropout=0.5))
    rows = (out[:, :, _KEYS - 1 :, :_KEYS] != 0).flatten(0, 2)  # queries that see these keys
    found = _alike(rows)
    if not found:
        return []
    heads = f"{_HEADS[0]} samples of {_HEADS[1]} heads"
    return [f"in a call of {heads}, {found:,} of {len(rows):,} queries drop the keys of another"]
