"""Level 2: every op, by every kernel of the plugin and by its reference on the device.

A check is an op and a property; it goes through all kernels, dtypes and cases, and reports the
first fault of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.accelerator.op.packages import packages_in_facts
from lmcore.accelerator.op.records import REFERENCE, missing_packages
from lmcore.errors import counted
from lmcore.runtime.runtime import deterministic_algorithms
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
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore.accelerator import OpImpl
    from lmcore_conformance.bench import Bench

__all__: list[str] = []

_SECONDS = 90.0
_BOTH = "output and gradients"
_LOSSES = {"cross_entropy", "linear_cross_entropy"}


@dataclass(frozen=True)
class _Use:
    """A kernel in one case and dtype, with the right result."""

    bench: Bench
    kernel: Kernel
    case: Case
    dtype: str
    wanted: Outcome

    @property
    def label(self) -> str:
        """Case and dtype, for findings."""
        return f"{self.case.label}, {self.dtype}"

    def call(self, **how: Any) -> Outcome:
        """Return the kernel's result; *how* are further arguments of `op.call.call`."""
        dtype = getattr(torch, self.dtype)
        return call(self.kernel.function, self.case, dtype, self.bench.torch_device, **how)

    def differences(self, found: Outcome, parts: str) -> Iterator[str]:
        """Yield how a result differs; *parts* is "output", "gradients" or both."""
        if "output" in parts:
            yield from self._difference("the output", found.out, self.wanted.out)
        for place, grad in self.wanted.grads.items() if "gradients" in parts else ():
            yield from self._difference(
                f"the gradient of argument {place + 1}", found.grads[place], grad
            )

    def _difference(self, name: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
        wrong = difference(self.bench.host(found), wanted, self.kernel.op, self.dtype)
        if wrong:
            yield f"{name} {wrong}"


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

    def compare(self, use: _Use, suffix: str = "", *, parts: str = _BOTH, **how: Any) -> None:
        """Call a kernel (see `_Use.call`) and compare the result; *suffix* ends the label."""
        with self.of(use.kernel, f"{use.label}{suffix}") as add:
            for wrong in use.differences(use.call(**how), parts):
                add(wrong)

    def conclude(self) -> str:
        """Return a line on the calls made.

        Raises:
            Failure: Something is wrong.
        """
        lines = []
        for name, text in self.first.items():
            more = self.counts[name] - 1
            lines.append(f"`{name}`: {text}" + (f" (and {more} more)" if more else ""))
        calls = ", ".join(f"{name}: {counted(count, 'call')}" for name, count in self.calls.items())
        return conclude(lines, calls)


def _each(
    bench: Bench,
    op: str,
    kind: str = "value",
    *,
    dtypes: Iterable[str] = (),
    labels: tuple[str, ...] = ("",),
) -> Iterator[_Use]:
    """Yield the supported cases of a kind in each dtype, for each kernel.

    Args:
        bench: Device and kernels.
        op: Name of the op.
        kind: Kind of the cases.
        dtypes: Names of dtypes; empty: all that the device computes in.
        labels: First words of the cases' labels.
    """
    kernels = kernels_of(bench, op)
    for name in dtypes or dtypes_of(bench):
        dtype = getattr(torch, name)
        for case in CASES[op]:
            if case.kind != kind or not case.label.startswith(labels):
                continue
            held = rounded(case if case.nan is None else with_nan(case), dtype)
            wanted = oracle(held, dtype)
            for kernel in kernels:
                if kernel.does(bench.device.type, name, case.attributes):
                    yield _Use(bench, kernel, held, name, wanted)


def _compare(bench: Bench, op: str, kind: str, parts: str) -> str:
    findings = _Findings()
    for use in _each(bench, op, kind):
        findings.compare(use, parts=parts)
    return findings.conclude()


def _forward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "output")


def _backward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "gradients")


def _empty(bench: Bench, op: str) -> str:
    return _compare(bench, op, "empty", _BOTH)


_LATER_CALLS = 100
"""Layers of a deep model: their forward passes run before the first layer's backward pass."""


def _layers(bench: Bench, op: str) -> str:
    """Compare the gradients of a call that many calls with other numbers follow."""
    findings = _Findings()
    for use in _regular(bench, op):
        findings.compare(use, f", {_LATER_CALLS} later calls", later_calls=_LATER_CALLS)
    return findings.conclude()


def _regular(bench: Bench, op: str) -> Iterator[_Use]:
    """Yield the regular cases in one dtype, as `_each`."""
    return _each(bench, op, dtypes=(next(dtypes_of(bench)),), labels=("regular",))


def _alone(bench: Bench, op: str) -> str:
    """Compare the gradient of each argument if the other arguments require none."""
    findings = _Findings()
    for use in _regular(bench, op):
        for place in use.case.tensors:
            right = Outcome(use.wanted.out, {place: use.wanted.grads[place]})
            findings.compare(replace(use, wanted=right), ", one gradient required", only=place)
    return findings.conclude()


def _layouts(bench: Bench, op: str) -> str:
    """Compare each memory layout with float64's results, for regular and odd cases."""
    findings = _Findings()
    for use in _each(bench, op, labels=("regular", "odd")):
        for name, layout in LAYOUTS.items():
            findings.compare(use, f", {name}", layout=layout)
    return findings.conclude()


def _large(bench: Bench, op: str) -> str:
    """Compare sizes of real models in one dtype, and prime sizes in a layout with gaps as well."""
    findings = _Findings()
    dtype = next(dtypes_of(bench))
    for exact in large_cases(op):
        case = rounded(exact, getattr(torch, dtype))
        wanted = oracle(case, getattr(torch, dtype))
        for name in (
            "contiguous",
            *(("every second element of a buffer",) * (case.label == PRIMES)),
        ):
            for kernel in kernels_of(bench, op):
                if kernel.does(bench.device.type, dtype, case.attributes):
                    use = _Use(bench, kernel, case, dtype, wanted)
                    findings.compare(use, f", {name}", layout=LAYOUTS.get(name, plain))
    return findings.conclude()


def _nan(bench: Bench, op: str) -> str:
    """Put a NaN into one element and check which results it reaches."""
    findings = _Findings()
    for use in _each(bench, op, "nan"):
        assert use.case.nan is not None
        place, wanted = use.case.nan[0], use.wanted
        with findings.of(use.kernel, use.dtype) as add:
            found = use.call()
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
    for use in _each(bench, op):
        if not use.kernel.is_deterministic:
            continue
        with findings.of(use.kernel, use.label) as add, deterministic_algorithms():
            first, *later = [use.call() for _ in range(3)]
            bench.device.synchronize()
            for other in later:
                pairs = [(first.out, other.out)]
                pairs += [(first.grads[p], other.grads[p]) for p in other.grads]
                if not all(_same(one, again) for one, again in pairs):
                    add("a second call gives other bits")
    return findings.conclude()


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


def _pure(bench: Bench, op: str) -> str:
    """Compare arguments before and after, and a second backward pass with the first."""
    findings = _Findings()
    for use in _each(bench, op, dtypes=("float32",)):
        with findings.of(use.kernel, use.case.label) as add:
            for wrong in _changes(bench, use.kernel, use.case):
                add(wrong)
    return findings.conclude()


def _changes(bench: Bench, kernel: Kernel, case: Case) -> Iterator[str]:
    """Yield the tensors that a kernel changes without being allowed to."""

    def sent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floating = value.is_floating_point()
        return value.to(bench.torch_device, torch.float32 if floating else None).clone()

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
    for use in _each(bench, op):
        own = getattr(torch, use.dtype)
        right = torch.promote_types(own, torch.float32) if op in _LOSSES else own
        with findings.of(use.kernel, use.label) as add:
            found = use.call()
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
        title.format(op=op),
        level="L2",
        reason=reason,
        group="deterministic" if name == "repeatable" else "ops",
        seconds=_SECONDS,
    )(run)


for _op in CALLED_OPS:
    for _property in _PROPERTIES:
        _register(_op, _property)


@check(
    "ops.reached",
    "Each kernel of the device's plugin supports at least one case of this suite.",
    level="L2",
    reason="A kernel that rejects every case is untested.",
    group="ops",
)
def reached(bench: Bench) -> str:
    """Call every kernel's `supports` with every case.

    Kernels whose package is not installed, or does not fit, are listed with the reason: that is a
    property of the machine, not of the plugin.
    """
    packages = (packages_in_facts(bench.device) or {}).values()
    unusable = {package.problem for package in packages} - {None}
    faults: list[str] = []
    absent: dict[str, list[str]] = {}
    for impl in bench.kernels:
        name = f"{impl.op}={impl.id}"
        if missing := missing_packages(impl):
            absent.setdefault(f"needs {', '.join(missing)}", []).append(name)
            continue
        reasons = _reasons_against_all(bench, impl)
        if not reasons:
            continue
        shown = "; ".join(reasons)
        if misfit := [reason for reason in reasons if reason in unusable]:
            absent.setdefault(misfit[0], []).append(name)
        elif impl.plugin != bench.selection.plugin:  # it may be for another device
            absent.setdefault(shown, []).append(name)
        else:
            faults.append(f"`{name}` does no case in any dtype: {shown}")
    left = "".join(f"; not tried: {', '.join(names)} ({why})" for why, names in absent.items())
    tried = len(bench.kernels) - sum(len(names) for names in absent.values())
    return conclude(faults, f"{counted(tried, 'kernel')} beside the {REFERENCE}s{left}")


def _reasons_against_all(bench: Bench, impl: OpImpl) -> list[str]:
    """Return the different reasons of a kernel that does no case; empty if it does one."""
    kernel = Kernel(impl.op, impl.id, impl)
    reasons: dict[str, None] = {}
    for dtype in dtypes_of(bench):
        for attributes in [case.attributes for case in CASES.get(impl.op, ())] or [{}]:
            against = kernel.reasons_against(bench.device.type, dtype, attributes)
            if not against:
                return []
            reasons |= dict.fromkeys(against)
    return list(reasons)
