"""Level 2: the ops that have no gradient: the optimizer's step and the norm of gradients."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.contract.dtype import dtype_name
from lmcore.contract.op.records import load_target
from lmcore_conformance.op.call import SPECS, Kernel, difference, dtypes_of, kernels_of
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcore_conformance.bench import Bench

_check = partial(check, level="L2", group="ops")
_SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
_OTHERS = {"lr": 0.3, "beta1": 0.5, "beta2": 0.7, "epsilon": 0.2, "weight_decay": 0.9}
_SHAPES = ((5,), (3, 7), (1,), (2, 3, 4), (64, 129))
_LARGE = ((1024, 1024), (1031, 257), (8192,), (1,), (257, 1031))
_MANY = 700
"""Gradients of a model of about 60 layers; kernels for lists of tensors take so many in parts."""
_PERIOD = 1031
_HUGE = 16_274 * _PERIOD
"""Elements of a tensor, of equal blocks: more than 2**24, where float32 lacks the next integer."""
_PARTS = ("weights", "gradients", "first moments", "second moments", "steps")
_KEPT = ("float32", "float64")


def _state(
    bench: Bench,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    large: bool = False,
    late: bool = False,
    many: bool = False,
) -> list[list[Tensor]]:
    """Return weights, gradients, moments and step counts.

    Args:
        bench: Device.
        dtype: Dtype of all but the counts.
        transposed: True if a weight, and the gradient of another, are transposed.
        large: True for weights of thousands of rows and columns.
        late: True for counts of a long run.
        many: True for 700 small weights.
    """

    def draw(seed: int, *shape: int) -> Tensor:
        return bench.values(*shape, seed=seed).to(dtype).to(bench.torch_device)

    steps = (0, 1, 5, 2**16 - 2, 2**23) if late else (0, 1, 5, 100, 7)
    if many:
        parts = [[one.clone() for one in draw(seed, _MANY, 5).unbind()] for seed in (1, 2, 3, 4)]
        squares = [one.square() for one in parts[3]]
        each = [torch.tensor(float(count), device=bench.torch_device) for count in steps]
        return [*parts[:3], squares, [each[at % 5].clone() for at in range(_MANY)]]
    shapes = _LARGE if large else _SHAPES
    params = [draw(1, *shape) for shape in shapes]
    grads = [draw(2, *shape) for shape in shapes]
    averages = [draw(3, *shape) for shape in shapes]
    squares = [draw(4, *shape).square() for shape in shapes]
    if transposed:
        for part, at in ((params, 1), (grads, 4)):
            part[at] = draw(5 + at, *reversed(shapes[at])).t()
    counts = [torch.tensor(float(count), device=bench.torch_device) for count in steps]
    return [params, grads, averages, squares, counts]


def _able(bench: Bench, op: str, dtype: str) -> list[Kernel]:
    return [kernel for kernel in kernels_of(bench, op) if kernel.does(bench.device.type, dtype, {})]


def _dtypes(bench: Bench) -> Iterator[str]:
    yield from (name for name in _KEPT if name in bench.device.dtypes)


def _stepped(
    bench: Bench,
    kernel: Kernel,
    dtype: str,
    settings: dict[str, float],
    *,
    steps: int = 3,
    **how: bool,
) -> Iterator[str]:
    """Yield how steps differ from the reference's in float64."""
    state = _state(bench, getattr(torch, dtype), **how)
    right = [[bench.host(tensor) for tensor in part] for part in state]
    for _ in range(steps):
        kernel.function(*state, **settings)
        load_target(SPECS["adamw"].reference)(*right, **settings)
    for name, found, wanted in zip(_PARTS, state, right, strict=True):
        for at, (tensor, exact) in enumerate(zip(found, wanted, strict=True)):
            wrong = difference(bench.host(tensor), exact, "adamw", dtype)
            if wrong:
                yield f"`{kernel.id}`, {dtype}: {name} {at} of {len(found)} {wrong}"
                return
    if any(step.dtype != torch.float32 for step in state[4]):
        yield f"`{kernel.id}`: the step counts are {state[4][0].dtype} afterwards"
    if "results" in signature(kernel.function).parameters:
        yield from _written_elsewhere(bench, kernel, dtype, settings, **how)


def _written_elsewhere(
    bench: Bench, kernel: Kernel, dtype: str, settings: dict[str, float], **how: bool
) -> Iterator[str]:
    """Yield how a step that writes its results to other tensors differs from one in place."""
    state, right = (_state(bench, getattr(torch, dtype), **how) for _ in range(2))
    kernel.function(*right, **settings)
    before = [[tensor.clone() for tensor in part] for part in state]
    results = tuple(
        [torch.full_like(tensor, -1) for tensor in part] for part in (state[0], *state[2:4])
    )
    kernel.function(*state, **settings, results=results)
    found = [results[0], before[1], *results[1:], state[4], state[0], *state[2:4]]
    wanted = [*right, before[0], *before[2:4]]
    kept = ("old weights", "old first moments", "old second moments")
    for name, some, others in zip((*_PARTS, *kept), found, wanted, strict=True):
        if not all(torch.equal(one, other) for one, other in zip(some, others, strict=True)):
            yield f"`{kernel.id}`, {dtype}, with `results`: the {name} differ"


def _huge_step(bench: Bench, kernel: Kernel, dtype: str) -> Iterator[str]:
    """Yield how a step of one huge weight differs from the reference's step of each block."""
    blocks = [bench.values(_PERIOD, seed=seed).to(getattr(torch, dtype)) for seed in range(1, 4)]
    blocks.append(blocks[0].square())
    right = [[block.double()] for block in blocks]
    load_target(SPECS["adamw"].reference)(*right, [torch.tensor(0.0)], **_SETTINGS)
    state = [[block.to(bench.torch_device).repeat(_HUGE // _PERIOD)] for block in blocks]
    count = torch.tensor(0.0, device=bench.torch_device)
    if "results" in signature(kernel.function).parameters:
        results = [[torch.full_like(state[at][0], -1)] for at in (0, 2, 3)]
        kernel.function(*state, [count.clone()], **_SETTINGS, results=tuple(results))
        written = [results[0], state[1], *results[1:]]
        yield from _huge_difference(bench, written, right, f"`{kernel.id}`, {dtype}, `results`")
        del results, written
    kernel.function(*state, [count], **_SETTINGS)
    yield from _huge_difference(bench, state, right, f"`{kernel.id}`, {dtype}")


def _huge_difference(
    bench: Bench, state: list[list[Tensor]], right: list[list[Tensor]], label: str
) -> Iterator[str]:
    """Yield the first block of huge tensors, if any, that is not the right one."""
    dtype = dtype_name(state[0][0].dtype)
    for name, (found,), (exact,) in zip(_PARTS, state, right, strict=False):
        rows = found.view(-1, _PERIOD)
        edges = [bench.host(rows.amin(0)), bench.host(rows.amax(0))]
        if not any(difference(edge, exact, "adamw", dtype) for edge in edges):
            continue
        for at, row in enumerate(bench.host(rows)):
            wrong = difference(row, exact, "adamw", dtype)
            if wrong:
                first = at * _PERIOD
                place = f"of elements {first:,} to {first + _PERIOD - 1:,} of {_HUGE:,}"
                yield f"{label}: one of the {name} {place} {wrong}"
                return


def _each_kernel(
    bench: Bench, settings: dict[str, float], *, large: bool = False, **how: bool
) -> str:
    faults: list[str] = []
    names = []
    for dtype in list(_dtypes(bench))[: 1 if large else None]:
        for kernel in _able(bench, "adamw", dtype):
            names.append(f"{kernel.id} {dtype}")
            try:
                steps = 1 if large else 3
                faults += _stepped(bench, kernel, dtype, settings, steps=steps, large=large, **how)
                if large:
                    faults += _stepped(bench, kernel, dtype, settings, steps=1, many=True)
                    faults += _huge_step(bench, kernel, dtype)
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything
                faults.append(f"`{kernel.id}`, {dtype}: it raised {type(error).__name__}: {error}")
    return conclude(faults, ", ".join(names))


@_check(
    "ops.adamw.update",
    "Three AdamW steps change weights, moments and counts as float64 does.",
    reason="A wrong term (weight decay, bias correction) changes the training.",
)
def adamw_update(bench: Bench) -> str:
    """Compare with usual settings."""
    return _each_kernel(bench, _SETTINGS)


@_check(
    "ops.adamw.settings",
    "AdamW steps are equal with settings for which every term matters, such as epsilon and weight"
    " decay.",
    reason="With usual settings an error in epsilon or decay hides below the tolerance.",
)
def adamw_settings(bench: Bench) -> str:
    """Compare with extreme settings."""
    return _each_kernel(bench, _OTHERS)


@_check(
    "ops.adamw.late",
    "AdamW steps are right after tens of thousands and millions of steps.",
    reason="A step count in 16 bits begins the bias correction again in the middle of a run.",
)
def adamw_late(bench: Bench) -> str:
    """Compare with step counts up to 2**23; betas near 1 make the bias correction matter."""
    return _each_kernel(bench, {**_SETTINGS, "beta1": 0.999, "beta2": 0.9999}, late=True)


@_check(
    "ops.adamw.layouts",
    "AdamW steps are equal if weight and gradient have different memory layouts.",
    reason="Tied and transposed weights have gradients of another layout.",
)
def adamw_layouts(bench: Bench) -> str:
    """Compare with transposed weights and gradients."""
    return _each_kernel(bench, _SETTINGS, transposed=True)


@_check(
    "ops.adamw.large",
    "An AdamW step is right for weights of thousands of rows and columns, also prime numbers, for"
    " one of more than 2^24 elements, and for 700 weights.",
    reason="Real models have these sizes, and a kernel may compute them in another way.",
)
def adamw_large(bench: Bench) -> str:
    """Compare a step of large weights, some of them transposed, of many and of a huge one."""
    return _each_kernel(bench, _SETTINGS, large=True, transposed=True)


@_check(
    "ops.adamw.empty",
    "A step without weights, or with an empty weight, does nothing.",
    reason="A rank may own no weights.",
)
def adamw_empty(bench: Bench) -> str:
    """Call with empty lists, and with a weight without elements."""
    faults = []
    for kernel in _able(bench, "adamw", "float32"):
        nothing = torch.empty(0, 3, device=bench.torch_device)
        for tensors in ([], [nothing]):
            state = [[tensor.clone() for tensor in tensors] for _ in range(4)]
            counts = [torch.tensor(0.0, device=bench.torch_device) for _ in tensors]
            try:
                kernel.function(*state, counts, **_SETTINGS)
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything
                faults.append(f"`{kernel.id}`: it raised {type(error).__name__}: {error}")
    return conclude(faults, "no weights, and a weight without elements")


@_check(
    "ops.adamw.nan",
    "A NaN in a gradient reaches its weight, and no other weight.",
    reason="A step that hides NaN continues with broken moments.",
)
def adamw_nan(bench: Bench) -> str:
    """Step with one NaN."""
    faults = []
    for kernel in _able(bench, "adamw", "float32"):
        state = _state(bench, torch.float32)
        state[1][1][2, 3] = float("nan")
        kernel.function(*state, **_SETTINGS)
        for part in (0, 2, 3):
            spoilt = [int(bench.host(tensor).isnan().sum()) for tensor in state[part]]
            if spoilt != [0, 1, 0, 0, 0]:
                faults.append(f"`{kernel.id}`: NaNs in the {_PARTS[part]}: {spoilt}")
    return conclude(faults, "one NaN stays one NaN")


def _norm_inputs(bench: Bench, dtype: torch.dtype) -> list[Tensor]:
    values = [
        bench.values(1000),
        bench.values(3, 7, seed=1).t(),
        torch.zeros(5),
        bench.values(1, seed=2).sum() * 30,
        torch.empty(0),
        bench.values(40, 50, seed=3)[:, ::2],
    ]
    return [value.to(dtype).to(bench.torch_device) for value in values]


@_check(
    "ops.grad_norm.value",
    "The norm over tensors of any shape and layout equals that in float64, with at least float32 "
    "precision, and the tensors are as they were.",
    reason="Clipping scales every gradient by it.",
)
def grad_norm_value(bench: Bench) -> str:
    """Compare in every dtype that the device computes in."""
    faults = []
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        if dtype not in bench.device.dtypes:
            continue
        few = _norm_inputs(bench, getattr(torch, dtype))
        many = list(bench.values(_MANY, 5, seed=4).to(few[0]).unbind())
        wide = torch.float64 if dtype == "float64" else torch.float32
        for grads in (few, many):
            exact = torch.cat([bench.host(grad).flatten() for grad in grads]).norm()
            kept = [grad.clone() for grad in grads]
            for kernel in _able(bench, "grad_norm", dtype):
                label = f"`{kernel.id}`, {dtype}, {len(grads)} tensors"
                found = kernel.function(grads)
                if found.dtype != wide or found.dim():
                    faults.append(f"{label}: it is {found.dtype}, {found.dim()} dims")
                error = abs(float(bench.host(found)) / float(exact) - 1)
                if not error < (1e-12 if dtype == "float64" else 2e-6):
                    faults.append(f"{label}: off by {error:.1e} of it")
                changed = [at for at in range(len(kept)) if not torch.equal(grads[at], kept[at])]
                if changed:
                    faults.append(f"{label}: it changes {len(changed)} of them, first {changed[0]}")
                    for grad, before in zip(grads, kept, strict=True):
                        grad.copy_(before)  # or the next kernel would be blamed
    return conclude(faults, f"6 and {_MANY} tensors")


@_check(
    "ops.grad_norm.large",
    "The norm is right for tensors of thousands of rows and columns, also prime numbers, and for"
    " one of more than 2^24 elements.",
    reason="Real models have these sizes, and a kernel may compute them in another way.",
)
def grad_norm_large(bench: Bench) -> str:
    """Compare tensors, some transposed and one with gaps, each alone and all together.

    In the huge tensor the last element alone is not zero, so that the norm has to read it.
    """
    dtype = next(dtypes_of(bench))
    values = [bench.values(*shape, seed=seed) for seed, shape in enumerate(_LARGE)]
    values[1], values[2] = values[1].t(), values[2][::2]
    grads = [value.to(getattr(torch, dtype)).to(bench.torch_device) for value in values]
    huge = torch.zeros(_HUGE, dtype=grads[0].dtype, device=bench.torch_device)
    huge[-1] = 3.0
    faults = []
    for label, some in {
        "together": grads,
        **{f"tensor {i}": [g] for i, g in enumerate(grads)},
        f"{_HUGE:,} elements, the last alone not 0": [huge],
    }.items():
        exact = torch.cat([bench.host(grad).flatten() for grad in some]).norm()
        for kernel in _able(bench, "grad_norm", dtype):
            error = abs(float(bench.host(kernel.function(some))) / float(exact) - 1)
            if not error < 1e-4:
                faults.append(f"`{kernel.id}`, {dtype}, {label}: off by {error:.1e} of it")
    return conclude(faults, f"{len(grads)} tensors, and one of {_HUGE:,} elements")


@_check(
    "ops.grad_norm.edges",
    "The norm of no tensors is 0, and so is that of zeros; it propagates NaN and infinity; large "
    "values do not overflow.",
    reason="A step is rejected by this norm if gradients are not finite.",
)
def grad_norm_edges(bench: Bench) -> str:
    """Call with nothing, and with hard values."""
    faults = []
    for kernel in _able(bench, "grad_norm", "float32"):
        if float(kernel.function([])) != 0.0:
            faults.append(f"`{kernel.id}`: of nothing it is {float(kernel.function([]))}")
        zeros = [torch.zeros(3, 2, device=bench.torch_device) for _ in range(2)]
        if (found := float(kernel.function(zeros))) != 0.0:
            faults.append(f"`{kernel.id}`: of zeros it is {found}")
        for value in (float("nan"), float("inf")):
            grads = [torch.ones(3), torch.tensor([1.0, value, 2.0])]
            found = float(kernel.function([grad.to(bench.torch_device) for grad in grads]))
            if found != float("inf") and found == found:  # noqa: PLR0124 - NaN is not itself
                faults.append(f"`{kernel.id}`: with {value} among them it is {found}")
        large = [torch.full((4,), 1e18, device=bench.torch_device)]
        if abs(float(kernel.function(large)) / 2e18 - 1) > 1e-5:
            faults.append(
                f"`{kernel.id}`: of four times 1e18 it is {float(kernel.function(large))}"
            )
    return conclude(faults, "nothing, zeros, NaN, infinity, 1e18")
