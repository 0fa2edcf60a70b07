"""Level 2: every op, by every kernel of the plugin and by its reference on the device.

A check is an op and a property; it goes through all kernels, dtypes and cases, and reports the
first fault of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import counted
from lmcore.contract.op.packages import packages_in_facts
from lmcore.contract.op.records import REFERENCE, missing_packages
from lmcore_conformance.op.call import (
    LAYOUTS,
    Kernel,
    Outcome,
    broadcast,
    broadcast_samples,
    dtypes_of,
    kernels_of,
    oracle,
    plain,
    rounded,
)
from lmcore_conformance.op.case import CALLED_OPS, CASES, trained_bias_cases
from lmcore_conformance.op.case_large import PRIMES, huge_cases, large_cases, width_cases
from lmcore_conformance.op.findings import BOTH, Findings, Use
from lmcore_conformance.op.uses import (
    each,
    in_autocast,
    made,
    register_property,
    regular,
    two_dtypes,
)
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore.contract import OpImpl
    from lmcore_conformance.bench import Bench

__all__: list[str] = []

_LOSSES = {"cross_entropy", "linear_cross_entropy"}


def _compare(bench: Bench, op: str, kind: str, parts: str) -> str:
    findings = Findings()
    for use in each(bench, op, kind):
        findings.compare(use, parts=parts)
    return findings.conclude()


def _forward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "output")


def _backward(bench: Bench, op: str) -> str:
    return _compare(bench, op, "value", "gradients")


def _empty(bench: Bench, op: str) -> str:
    return _compare(bench, op, "empty", BOTH)


_LATER_CALLS = 100
"""Layers of a deep model: their forward passes run before the first layer's backward pass."""


def _layers(bench: Bench, op: str) -> str:
    """Compare the gradients of a call that many calls with other numbers follow."""
    findings = Findings()
    for use in regular(bench, op):
        findings.compare(use, f", {_LATER_CALLS} later calls", later_calls=_LATER_CALLS)
    return findings.conclude()


def _alone(bench: Bench, op: str) -> str:
    """Compare the gradient of each argument if the other arguments require none."""
    findings = Findings()
    for use in regular(bench, op):
        for place in use.case.tensors:
            right = Outcome(use.wanted.out, {place: use.wanted.grads[place]})
            findings.compare(replace(use, wanted=right), ", one gradient required", only=place)
    return findings.conclude()


def _layouts(bench: Bench, op: str) -> str:
    """Compare each memory layout with float64's results, for regular and odd cases."""
    findings = Findings()
    for use in each(bench, op, labels=("regular", "odd")):
        for name, layout in LAYOUTS.items():
            findings.compare(use, f", {name}", layout=layout)
    return findings.conclude()


def _large(bench: Bench, op: str) -> str:
    """Compare sizes of real models in one dtype, and prime sizes in a layout with gaps as well."""
    findings = Findings()
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
                    use = Use(bench, kernel, case, dtype, wanted)
                    findings.compare(use, f", {name}", layout=LAYOUTS.get(name, plain))
    return findings.conclude()


def _widths(bench: Bench, op: str) -> str:
    """Compare the head dims and widths of published models, and a far larger size."""
    findings = Findings()
    for use in made(bench, op, width_cases(op), two_dtypes(bench)):
        findings.compare(use)
    return findings.conclude()


def _huge(bench: Bench, op: str) -> str:
    """Compare calls with many rows, heads and elements, with the gradients of all arguments."""
    findings = Findings()
    for use in made(bench, op, huge_cases(op), two_dtypes(bench)):
        findings.compare(use)
    return findings.conclude()


def _broadcast(bench: Bench, op: str) -> str:
    """Compare with arguments and an incoming gradient whose rows share their memory."""
    findings = Findings()
    cases = [case for case in CASES[op] if case.label in {"regular", "odd"}]
    for name, layout in {"rows": broadcast, "samples": broadcast_samples}.items():
        for use in made(bench, op, cases, dtypes_of(bench), layout):
            findings.compare(use, f", {name} that share memory", layout=layout)
    return findings.conclude()


def _autocast(bench: Bench, op: str) -> str:
    """Call kernels inside each policy's autocast, with arguments of both dtypes."""
    findings = Findings()
    for use, suffix, given, context, weights in in_autocast(bench, op):
        findings.compare_in(use, suffix, given, context, weights)
    return findings.conclude() or "no policy has an autocast"


def _nan(bench: Bench, op: str) -> str:
    """Put a NaN into one element and check which results it reaches."""
    findings = Findings()
    for use in each(bench, op, "nan"):
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


def _dtypes(bench: Bench, op: str) -> str:
    """Check the dtypes of outputs and gradients."""
    findings = Findings()
    for use in each(bench, op):
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
    "widths": (
        _widths,
        (
            "`{op}` and its gradients are right at the head dims and widths of published models, "
            "and for wider rows (above 65,536 positions or entries of a vocabulary)."
        ),
        "A kernel has tiles and special cases for single sizes, and limits that it may not check.",
    ),
    "huge": (
        _huge,
        (
            "`{op}` and its gradients are right above 16,384 rows and 2^22 elements, and above "
            "65,535 rows or heads, also in bfloat16."
        ),
        "A batch has more; grids and indices overflow, and a kernel may change its method.",
    ),
    "broadcast": (
        _broadcast,
        "`{op}` and its gradients are right if rows or samples of an argument share their memory.",
        "`expand` makes such arguments, and `sum` such gradients.",
    ),
    "autocast": (
        _autocast,
        "`{op}` and its gradients are right inside the autocast of each precision policy.",
        "Training in half precision calls kernels there, with arguments of both dtypes, or mixed.",
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
}


def _bias_gradient(bench: Bench, op: str) -> str:
    """Compare all gradients of calls with a trained bias, and the bias's alone."""
    findings = Findings()
    for use in made(bench, op, trained_bias_cases(), dtypes_of(bench)):
        findings.compare(use)
        (bias,) = use.case.named
        right = Outcome(use.wanted.out, {bias: use.wanted.grads[bias]})
        findings.compare(replace(use, wanted=right), ", one gradient required", only=bias)
    return findings.conclude() or "no kernel claims the trait `score_bias_gradient`"


register_property(
    "attention",
    "bias-gradient",
    _bias_gradient,
    "With the trait `score_bias_gradient` `{op}` gives the gradient of a bias of the scores, with "
    "the gradients of the other arguments and alone.",
    "T5's relative positions would stay at their initial values, or learn something else.",
)


for _op in CALLED_OPS:
    for _name, (_make, _title, _reason) in _PROPERTIES.items():
        register_property(_op, _name, _make, _title, _reason)


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
