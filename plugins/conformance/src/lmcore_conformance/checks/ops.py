"""Level 2: every op, by every kernel of the plugin and by its reference on the device.

A check is an op and a property; it goes through all kernels, dtypes and cases, and reports the
first fault of each kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.accelerator.op.records import REFERENCE, missing_packages
from lmcore_conformance.op.call import (
    LAYOUTS,
    Kernel,
    Outcome,
    call,
    difference,
    dtypes_of,
    kernels_of,
    oracle,
    plain,
    rounded,
    with_nan,
)
from lmcore_conformance.op.case import CALLED_OPS, CASES, Case
from lmcore_conformance.op.case_large import PRIMES, large_cases
from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__: list[str] = []

_SECONDS = 90.0
_LOSSES = {"cross_entropy", "linear_cross_entropy"}


class _Findings:
    """Findings of a check: for each kernel the first one, and their number."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def of(self, kernel: Kernel, subject: str) -> Iterator[Callable[[str | None], None]]:
        """Take findings about one use of a kernel; an exception is one, too."""

        def add(text: str | None) -> None:
            if text:
                self.first.setdefault(kernel.id, f"{subject}: {text}")
                self.counts[kernel.id] = self.counts.get(kernel.id, 0) + 1

        self.calls[kernel.id] = self.calls.get(kernel.id, 0) + 1
        try:
            yield add
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            first = str(error).strip().partition("\n")[0]
            add(f"it raised {type(error).__name__}: {first:.200}")

    def conclude(self) -> str:
        """Return a line on the calls made.

        Raises:
            Failure: Something is wrong.
        """
        if self.first:
            lines = []
            for name, text in self.first.items():
                more = self.counts[name] - 1
                lines.append(f"`{name}`: {text}" + (f" (and {more} more)" if more else ""))
            raise Failure(*lines)
        return ", ".join(f"{name}: {count} calls" for name, count in self.calls.items())


def _each(
    bench: Bench, op: str, kind: str, dtypes: tuple[str, ...] = ()
) -> Iterator[tuple[str, Case, Outcome, list[Kernel]]]:
    """Yield cases of a kind in each dtype, with the right result and the supporting kernels."""
    kernels = kernels_of(bench, op)
    for dtype in dtypes or dtypes_of(bench):
        for case in CASES[op]:
            if case.kind != kind:
                continue
            held = rounded(case if case.nan is None else with_nan(case), getattr(torch, dtype))
            able = [
                kernel
                for kernel in kernels
                if kernel.does(bench.device.type, dtype, case.attributes)
            ]
            yield dtype, held, oracle(held, getattr(torch, dtype)), able


def _differences(
    bench: Bench, found: Outcome, wanted: Outcome, op: str, dtype: str, parts: str
) -> Iterator[str]:
    """Yield how results differ; *parts* is "output", "gradients" or both."""
    if "output" in parts:
        wrong = difference(bench.host(found.out), wanted.out, op, dtype)
        if wrong:
            yield f"the output {wrong}"
    for place, grad in wanted.grads.items() if "gradients" in parts else ():
        wrong = difference(bench.host(found.grads[place]), grad, op, dtype)
        if wrong:
            yield f"the gradient of argument {place + 1} {wrong}"


def _compare(bench: Bench, op: str, kind: str, parts: str) -> str:
    findings = _Findings()
    for dtype, case, wanted, kernels in _each(bench, op, kind):
        for kernel in kernels:
            with findings.of(kernel, f"{case.label}, {dtype}") as add:
                found = call(kernel.function, case, getattr(torch, dtype), bench.where)
                for wrong in _differences(bench, found, wanted, op, dtype, parts):
                    add(wrong)
    return findings.conclude()


def _forward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "output")


def _backward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "gradients")


_LATER_CALLS = 100
"""Layers of a deep model: their forward passes run before the first layer's backward pass."""


def _layers(bench: Bench, op: str) -> str:
    """Compare the gradients of a call that many calls with other numbers follow."""
    findings = _Findings()
    for dtype, case, wanted, kernels in _regular(bench, op):
        for kernel in kernels:
            with findings.of(kernel, f"{case.label}, {dtype}, {_LATER_CALLS} later calls") as add:
                own = getattr(torch, dtype)
                found = call(kernel.function, case, own, bench.where, later_calls=_LATER_CALLS)
                for wrong in _differences(bench, found, wanted, op, dtype, "output and gradients"):
                    add(wrong)
    return findings.conclude()


def _regular(bench: Bench, op: str) -> Iterator[tuple[str, Case, Outcome, list[Kernel]]]:
    """Yield the regular cases in one dtype, as `_each`."""
    for dtype, case, wanted, kernels in _each(bench, op, "value", (next(dtypes_of(bench)),)):
        if case.label.startswith("regular"):
            yield dtype, case, wanted, kernels


def _alone(bench: Bench, op: str) -> str:
    """Compare the gradient of each argument if the other arguments require none."""
    findings = _Findings()
    for dtype, case, wanted, kernels in _regular(bench, op):
        for kernel, place in itertools.product(kernels, case.tensors):
            with findings.of(kernel, f"{case.label}, {dtype}, one gradient required") as add:
                own = getattr(torch, dtype)
                found = call(kernel.function, case, own, bench.where, only=place)
                right = Outcome(wanted.out, {place: wanted.grads[place]})
                for wrong in _differences(bench, found, right, op, dtype, "output and gradients"):
                    add(wrong)
    return findings.conclude()


def _empty(bench: Bench, op: str) -> str:
    return _compare(bench, op, "empty", "output and gradients")


def _layouts(bench: Bench, op: str) -> str:
    """Compare each memory layout with float64's results, for regular and odd cases."""
    findings = _Findings()
    for dtype, case, wanted, kernels in _each(bench, op, "value"):
        if not case.label.startswith(("regular", "odd")):
            continue
        for kernel in kernels:
            for name, layout in LAYOUTS.items():
                with findings.of(kernel, f"{case.label}, {dtype}, {name}") as add:
                    own = getattr(torch, dtype)
                    found = call(kernel.function, case, own, bench.where, layout=layout)
                    both = "output and gradients"
                    for wrong in _differences(bench, found, wanted, op, dtype, both):
                        add(wrong)
    return findings.conclude()


def _large(bench: Bench, op: str) -> str:
    """Compare sizes of real models in one dtype, and prime sizes in a layout with gaps as well."""
    findings = _Findings()
    dtype = next(dtypes_of(bench))
    own = getattr(torch, dtype)
    for exact in large_cases(op):
        case = rounded(exact, own)
        wanted = oracle(case, own)
        names = ["contiguous", *(("every second element of a buffer",) * (case.label == PRIMES))]
        for name in names:
            layout = LAYOUTS.get(name, plain)
            for kernel in kernels_of(bench, op):
                if not kernel.does(bench.device.type, dtype, case.attributes):
                    continue
                with findings.of(kernel, f"{case.label}, {dtype}, {name}") as add:
                    found = call(kernel.function, case, own, bench.where, layout=layout)
                    both = "output and gradients"
                    for wrong in _differences(bench, found, wanted, op, dtype, both):
                        add(wrong)
    return findings.conclude()


def _nan(bench: Bench, op: str) -> str:
    """Put a NaN into one element and check which results it reaches."""
    findings = _Findings()
    for dtype, case, wanted, kernels in _each(bench, op, "nan"):
        assert case.nan is not None
        place = case.nan[0]
        for kernel in kernels:
            with findings.of(kernel, dtype) as add:
                found = call(kernel.function, case, getattr(torch, dtype), bench.where)
                found_nan, wanted_nan = bench.host(found.out).isnan(), wanted.out.isnan()
                if (wanted_nan & ~found_nan).any():
                    add("a NaN vanishes from the output")
                elif (found_nan & ~wanted_nan).any():
                    add("a NaN reaches results of other rows")
                grad = bench.host(found.grads[place])
                if wanted.grads[place].isnan().any() and not grad.isnan().any():
                    add("a NaN vanishes from the gradient")
    return findings.conclude()


def _repeatable(bench: Bench, op: str) -> str:
    """Call kernels with the trait `deterministic` again, as such a run does, and compare bits."""
    findings = _Findings()
    for dtype, case, _, kernels in _each(bench, op, "value"):
        for kernel in (kernel for kernel in kernels if kernel.is_deterministic):
            with findings.of(kernel, f"{case.label}, {dtype}") as add, _as_deterministic():
                runs = [
                    call(kernel.function, case, getattr(torch, dtype), bench.where)
                    for _ in range(3)
                ]
                bench.device.synchronize()
                for other in runs[1:]:
                    pairs = [(runs[0].out, other.out)]
                    pairs += [(runs[0].grads[p], other.grads[p]) for p in other.grads]
                    if not all(_same(first, second) for first, second in pairs):
                        add("a second call gives other bits")
    return findings.conclude()


@contextmanager
def _as_deterministic() -> Iterator[None]:
    """Make torch choose deterministic algorithms, and refuse others, within the context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


def _pure(bench: Bench, op: str) -> str:
    """Compare arguments before and after, and a second backward pass with the first."""
    findings = _Findings()
    for _, case, _, kernels in _each(bench, op, "value", ("float32",)):
        for kernel in kernels:
            with findings.of(kernel, case.label) as add:
                for wrong in _changes(bench, kernel, case):
                    add(wrong)
    return findings.conclude()


def _changes(bench: Bench, kernel: Kernel, case: Case) -> Iterator[str]:
    """Yield the tensors that a kernel changes without being allowed to."""

    def sent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floating = value.is_floating_point()
        return value.to(bench.where, torch.float32 if floating else None).clone()

    arguments = {place: sent(value) for place, value in {**case.others, **case.tensors}.items()}
    before = {p: v.clone() for p, v in arguments.items() if isinstance(v, Tensor)}
    leaves = [arguments[place].requires_grad_() for place in case.tensors]
    kwargs = {name: sent(value) for name, value in case.kwargs.items()}
    out = kernel.function(*(arguments[place] for place in sorted(arguments)), **kwargs)
    kept, grad = out.detach().clone(), torch.ones_like(out)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    bench.device.synchronize()
    for place, value in before.items():
        if not _same(arguments[place].detach(), value):
            yield f"argument {place + 1} is changed"
    if not torch.equal(grad, torch.ones_like(grad)):
        yield "the incoming gradient is changed"
    if not _same(out.detach(), kept):
        yield "backward changes the output"
    close = (torch.allclose(a, b, 1e-4, 1e-5, True) for a, b in zip(first, second, strict=True))  # noqa: FBT003
    if not all(close):
        yield "a second backward pass gives other gradients"


def _dtypes(bench: Bench, op: str) -> str:
    """Check the dtypes of outputs and gradients."""
    findings = _Findings()
    for dtype, case, _, kernels in _each(bench, op, "value"):
        own = getattr(torch, dtype)
        right = torch.promote_types(own, torch.float32) if op in _LOSSES else own
        for kernel in kernels:
            with findings.of(kernel, f"{case.label}, {dtype}") as add:
                found = call(kernel.function, case, own, bench.where)
                if found.out.dtype != right:
                    add(f"the output is {found.out.dtype}")
                for place, grad in found.grads.items():
                    if grad.dtype != own:
                        add(f"the gradient of argument {place + 1} is {grad.dtype}")
    return findings.conclude()


_PROPERTIES: dict[str, tuple[Callable[[Bench, str], str], str, str]] = {
    "forward": (
        _forward,
        "`{op}` gives what its reference gives in float64, for regular and odd shapes.",
        "A kernel that is off trains another model.",
    ),
    "backward": (
        _backward,
        "The gradients of `{op}` equal those of its reference in float64.",
        "A missing term in a gradient breaks training without an error.",
    ),
    "alone": (
        _alone,
        "The gradient of each argument of `{op}` is right if no other argument requires one.",
        "Frozen weights, and inputs without a gradient, are usual in fine-tuning.",
    ),
    "layers": (
        _layers,
        "The gradients of `{op}` are right after a hundred further calls with other numbers.",
        "A deep model calls it in each layer before the first backward pass; saved tensors stay.",
    ),
    "layouts": (
        _layouts,
        "`{op}` and its gradients do not depend on how arguments lie in memory.",
        "Models pass views, transposed and sliced; a kernel that ignores strides reads others.",
    ),
    "large": (
        _large,
        "`{op}` and its gradients are right for thousands of rows and columns, also prime numbers.",
        "Real models have these sizes, and a kernel may compute them in another way.",
    ),
    "empty": (
        _empty,
        "`{op}` of nothing is nothing, and its weights' gradients are zero.",
        "A rank may have no tokens.",
    ),
    "nan": (
        _nan,
        "A NaN in an argument of `{op}` reaches the results that it should, and no others.",
        "A run stops at a NaN loss; a kernel that hides NaN lets it continue with broken weights.",
    ),
    "dtypes": (
        _dtypes,
        "Output and gradients of `{op}` have the dtypes of the reference's.",
        "A wider or narrower dtype changes memory and numbers of everything behind it.",
    ),
    "repeatable": (
        _repeatable,
        "Under `--deterministic`, where `{op}` claims to be so, repeated calls give the same bits.",
        "`--deterministic` binds kernels by that claim.",
    ),
    "pure": (
        _pure,
        "`{op}` changes neither its arguments nor the incoming gradient.",
        "Recomputation and residual connections read them again.",
    ),
}


def _register(op: str, name: str) -> None:
    make, title, reason = _PROPERTIES[name]

    def run(bench: Bench) -> str:
        return make(bench, op)

    check(
        f"ops.{op}.{name}",
        "L2",
        title.format(op=op),
        reason=reason,
        group="deterministic" if name == "repeatable" else "ops",
        seconds=_SECONDS,
    )(run)


for _op in CALLED_OPS:
    for _property in _PROPERTIES:
        _register(_op, _property)


@check(
    "ops.reached",
    "L2",
    "Each kernel of the device's plugin supports at least one case of this suite.",
    reason="A kernel that rejects every case is untested.",
    group="ops",
)
def reached(bench: Bench) -> str:
    """Call every kernel's `supports` with every case."""
    faults, absent = [], []
    for impl in bench.kernels:
        name = f"{impl.op}={impl.id}"
        if missing_packages(impl):
            absent.append(name)
            continue
        attributes = [case.attributes for case in CASES.get(impl.op, ())] or [{}]
        kernel = next(kernel for kernel in kernels_of(bench, impl.op) if kernel.impl == impl)
        if not any(
            kernel.does(bench.device.type, dtype, attribute)
            for dtype in dtypes_of(bench)
            for attribute in attributes
        ):
            if impl.plugin != bench.selection.plugin:  # it may be for another device
                absent.append(name)
                continue
            faults.append(f"`{name}` does none of {len(attributes)} cases in any dtype")
    if faults:
        raise Failure(*faults)
    missing = f"; not tried: {', '.join(absent)}" if absent else ""
    return f"{len(bench.kernels) - len(absent)} kernels beside the {REFERENCE}s{missing}"
