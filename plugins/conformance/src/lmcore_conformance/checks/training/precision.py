"""Level 3: precision policies: the dtypes of products, and the bits of weights and gradients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lmcore.base.errors import DeviceError, LmcoreError, counted
from lmcore.contract import PrecisionPolicy
from lmcore.contract.precision.check import check_products
from lmcore.contract.precision.products import (
    Product,
    ProductCounter,
    counted_products,
    in_words,
    is_wider,
)
from lmcore.plugin import choose_precision
from lmcore_conformance.registry import Failure, check, conclude
from lmcore_conformance.tiny_run import TinyRuns, tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="training", seconds=120)

_MANY = 500
"""Uses of a precision's context, as in a few hundred steps."""

_ROWS, _INNER, _OUTER = 64, 32, 48
_LOW_BITS = 0x1FFF
"""Bits of float32 that neither float16 nor bfloat16 has."""

_PASSES = 8
"""Backward passes whose gradients are added: in a half precision one has no bits of float32."""

_ROUNDED = (
    "have the bits of a half precision alone: they are rounded, and it promises float32 by `reduce`"
)

_PASS_CHANGES = "a forward and a backward pass change the numbers of"

_STEP = 1e-20
"""Change of a weight in a step that counts as none; smaller than each bit of a weight but 0."""

_OTHER = 100
"""Seed of other weights."""

_STALE = 0.25
"""Share of an output, by its norm, by which rounding never changes it and other weights always."""

_SMALL = 1e-9
"""A gradient that float16 cannot hold; a loss scale keeps it."""


@_check(
    "train.precision-in-force",
    "Every offered precision is in force, also after many uses: the dtypes of weights, of "
    "gradients, and of all products of one step of the tiny model, forward and backward; `prepare` "
    "and the passes of a prepared model keep all bits of weights and gradients, no pass uses "
    "old weights, and float16 needs `loss_scaling`.",
    reason="A policy that silently computes in another dtype is slow, or wrong.",
    seconds=90,
)
def precision_in_force(bench: Bench) -> str:
    """Verify each policy on the device, count the products of a step, and find the default."""
    faults, done = [], []
    used: set[str] = set()
    try:
        default = choose_precision(bench.all_precision_policies, None).name
    except LmcoreError as error:
        faults.append(f"{error.what}: {error.why}")
        default = "none"
    with tiny_runs(bench) as runs:
        for policy in bench.precision_policies:
            if policy.available() is not None:
                continue
            try:
                policy.verify(bench.device)
                products = counted(_counted_step(runs, policy), "product")
                done.append(f"{policy.name} ({products})")
                _use(policy, _MANY)
                used.add(policy.name)
                policy.verify(bench.device)
            except LmcoreError as error:
                late = f"after {_MANY} uses of its `context()`: " if policy.name in used else ""
                faults.append(f"`{policy.name}`: {late}{error.what}: {error.why}")
            found = (
                *_lost_bits(bench, policy),
                *_stale(bench, policy),
                *_rounded_in_gpt(runs, policy),
                *_underflow(bench, policy),
            )
            faults += [f"`{policy.name}`: {fault}" for fault in found]
        if faults:
            raise Failure(*faults)
    return f"{', '.join(done)}; default {default}"


def _counted_step(runs: TinyRuns, policy: PrecisionPolicy) -> int:
    """Count and check the products of a step, and whether `prepare` had something to do."""
    products, unprepared = _products(runs, policy)
    check_products(policy, products, runs.bench.device.type)
    if unprepared:
        raise DeviceError(
            f"`prepare` of precision `{policy.name}` changes nothing in a GPT",
            why="no module, weight or hook is another one afterwards; projections are a subclass "
            "of `nn.Linear`, so `isinstance` finds them and `type(module) is nn.Linear` does not",
        )
    return products.total()


def _products(runs: TinyRuns, policy: PrecisionPolicy) -> tuple[Counter[Product], bool]:
    """Return the products of a step, and True if `prepare` changed nothing in the model.

    The head is its reference, since kernels of it may be wider than the policy.
    """

    def train(counter: ProductCounter) -> None:
        runs.train(
            f"--precision {policy.name} --ops linear_cross_entropy=reference",
            steps=1,
            around_step=lambda: counter,
        )

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(PrecisionPolicy.__module__)
    logger.addHandler(handler)
    try:
        products = counted_products(train, runs.bench.device.type)
    finally:
        logger.removeHandler(handler)
    return products, any("`prepare` changed nothing" in text for text in warnings)


@_check(
    "train.attention-precision",
    "Attention is computed in the dtype of each offered precision, forward and backward.",
    reason="A policy without autocast leaves the reference of attention in float32: slow, and not "
    "what its name promises.",
    requires=["attention_precision"],
    seconds=90,
)
def attention_precision(bench: Bench) -> str:
    """Count the products of attention in a step of the tiny model, by their dtypes."""
    faults, done = [], []
    with tiny_runs(bench) as runs:
        for policy in bench.precision_policies:
            if policy.available() is not None:
                continue
            products, _ = _products(runs, policy)
            own = Counter({one: count for one, count in products.items() if one.batched})
            dtypes = sorted({dtype for one in own for dtype in one.dtypes})
            done.append(f"{policy.name}: {', '.join(dtypes) or 'no op of torch'}")
            wide = [dtype for dtype in dtypes if is_wider(dtype, policy.activations)]
            if wide:
                faults.append(
                    f"`{policy.name}` promises products in {policy.compute}, and attention is "
                    f"computed in {', '.join(wide)}: {in_words(own)}"
                )
    return conclude(faults, "; ".join(done))


def _use(policy: PrecisionPolicy, count: int) -> None:
    for _ in range(count):
        with policy.context():
            pass


def _lost_bits(bench: Bench, policy: PrecisionPolicy) -> Iterator[str]:
    """Prepare small layers, and compute gradients; yield what is rounded."""
    layers = _layers(bench)
    before = _numbers(layers)
    if policy.prepare is not None:
        policy.prepare(layers)
    for name in _changed(layers, before):
        yield f"`prepare` changes the numbers of `{name}`, which are to stay bit for bit"
    before = _numbers(layers)
    if policy.reduce == "float32":
        for module in layers:
            yield from _rounded_gradients(bench, policy, module)
    else:
        for module in layers:
            _backward(bench, _pass(bench, policy, module, 0))
    for name in _changed(layers, before):
        yield f"{_PASS_CHANGES} `{name}`, which are to stay bit for bit"


def _layers(bench: Bench, seed: int = 0) -> nn.Sequential:
    """Return small layers on the device, with normal numbers."""
    layers = nn.Sequential(nn.Linear(_INNER, _OUTER), nn.LayerNorm(_OUTER)).to(bench.torch_device)
    with torch.no_grad():
        for place, parameter in enumerate(layers.parameters()):
            parameter.copy_(bench.values(*parameter.shape, seed=seed + place).float())
    return layers


def _numbers(layers: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights on the host."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in layers.named_parameters()
    }


def _changed(layers: nn.Module, before: dict[str, Tensor]) -> Iterator[str]:
    """Yield the names of weights whose numbers are not the ones before, rounded to their dtype."""
    for name, found in _numbers(layers).items():
        if name in before and not torch.equal(found, before[name].to(found.dtype)):
            yield name


def _stale(bench: Bench, policy: PrecisionPolicy) -> Iterator[str]:
    """Change weights of prepared layers between two passes without gradients; yield what is old."""
    old: dict[str, list[str]] = {}
    for how, change in _CHANGES.items():
        layers, new = (_prepared(bench, policy, seed) for seed in (0, _OTHER))
        _evaluated(bench, policy, layers)
        layers.train()
        change(layers, new)
        outputs = (_evaluated(bench, policy, one) for one in (layers, new))
        for found, right, module in zip(*outputs, layers, strict=True):
            if not (found - right).norm() <= _STALE * right.norm():
                old.setdefault(type(module).__name__, []).append(how)
    for name, ways in old.items():
        yield (
            f"a prepared `{name}` computes with old weights under `no_grad` after they were "
            f"changed {' and '.join(ways)}: validation uses them"
        )


def _prepared(bench: Bench, policy: PrecisionPolicy, seed: int) -> nn.Sequential:
    layers = _layers(bench, seed)
    if policy.prepare is not None:
        policy.prepare(layers)
    return layers


def _evaluated(bench: Bench, policy: PrecisionPolicy, layers: nn.Sequential) -> list[Tensor]:
    """Return the output of each layer, computed without gradients."""
    layers.eval()
    with torch.no_grad():
        return [bench.host(_pass(bench, policy, module, 0)) for module in layers]


def _change_in_place(layers: nn.Module, new: nn.Module) -> None:
    with torch.no_grad():
        for weight, other in zip(layers.parameters(), new.parameters(), strict=True):
            weight.copy_(other)


def _load(layers: nn.Module, new: nn.Module) -> None:
    layers.load_state_dict(new.state_dict())


_CHANGES = {"in place": _change_in_place, "by `load_state_dict`": _load}


def _rounded_gradients(bench: Bench, policy: PrecisionPolicy, module: nn.Module) -> Iterator[str]:
    """Compute gradients of a prepared layer; yield the ones without bits of float32."""
    # In a lower precision one pass has no more bits than it; a sum of passes has.
    passes = 1 if _pass(bench, policy, module, 0).dtype == torch.float32 else _PASSES
    module.zero_grad()
    for seed in range(passes):
        _backward(bench, _pass(bench, policy, module, seed), seed=seed + 9)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and _is_rounded(parameter.grad):
            yield f"gradients of `{name}` of a `{type(module).__name__}` {_ROUNDED}"


def _rounded_in_gpt(runs: TinyRuns, policy: PrecisionPolicy) -> Iterator[str]:
    """Train a step of the tiny model; yield if gradients of some weights are rounded.

    Its modules are the core's, which a policy may treat otherwise than torch's.
    """
    if policy.reduce != "float32":
        return
    rounded: list[str] = []

    def see(name: str, grad: Tensor) -> None:
        if _is_rounded(grad):
            rounded.append(name)

    # The step changes weights by less than `_STEP`: what changes them by more is the policy.
    flags = f"--precision {policy.name} --micro-batch-size 1 --global-batch-size {_PASSES}"
    flags += f" --lr {_STEP / 1000} --weight-decay 0"
    flags += " --initial-loss-scale 256" if policy.loss_scaling else ""
    changed: list[str] = []
    try:
        before = runs.train(flags, steps=0)
        after = runs.train(flags, steps=1, see=see)
        changed = [
            name
            for name in after.layouts
            if (after.tensors[name] - before.tensors[name]).abs().max() > _STEP
        ]
    except LmcoreError as error:
        yield f"{error.what}: {error.why}"
    if changed:
        weights = f"{counted(len(changed), 'weight')} of a GPT, such as `{changed[0]}`"
        yield f"{_PASS_CHANGES} {weights}: they are to stay bit for bit until the step"
    if rounded:
        weights = f"{counted(len(rounded), 'weight')} of a GPT, such as `{rounded[0]}`,"
        yield f"gradients of {weights} {_ROUNDED}"


def _is_rounded(grad: Tensor) -> bool:
    """Return True if a gradient in float32 has no bit that a half precision lacks."""
    if grad.dtype != torch.float32 or not grad.any() or not grad.isfinite().all():
        return False  # other checks say whether dtype and numbers are right
    return not (grad.detach().cpu().contiguous().view(torch.int32) & _LOW_BITS).any()


def _pass(bench: Bench, policy: PrecisionPolicy, module: nn.Module, seed: int) -> Tensor:
    """Return the output of a layer for normal numbers."""
    weight = next(module.parameters())
    x_TI = bench.values(_ROWS, weight.shape[-1], seed=seed).to(bench.torch_device, weight.dtype)
    with policy.context():
        out_TO: Tensor = module(x_TI.requires_grad_())
    return out_TO


def _backward(bench: Bench, out_TO: Tensor, *, seed: int = 9, scale: float = 1.0) -> None:
    """Give the output normal numbers, times *scale*, as its gradient."""
    grad_TO = bench.values(*out_TO.shape, seed=seed).float().to(bench.torch_device)
    (out_TO.float() * grad_TO * scale).sum().backward()


def _underflow(bench: Bench, policy: PrecisionPolicy) -> Iterator[str]:
    """Yield if small gradients become 0 in float16 and no loss scale is asked for."""
    if policy.compute != "float16" or policy.loss_scaling:
        return
    layers = nn.Sequential(nn.Linear(_INNER, _OUTER)).to(bench.torch_device)
    if policy.prepare is not None:
        policy.prepare(layers)
    _backward(bench, _pass(bench, policy, layers, 0), scale=_SMALL)
    weight = next(layers.parameters())
    if weight.grad is None or not weight.grad.any():
        yield (
            f"gradients of {_SMALL:g} become 0 in float16, and it does not claim `loss_scaling`: "
            "training stops to learn"
        )
