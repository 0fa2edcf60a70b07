"""Uses of each kernel in the cases of an op, and the registration of a property of every op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.contract.dtype import dtype_name
from lmcore_conformance.op.call import (
    SPECS,
    Outcome,
    dtypes_of,
    kernels_of,
    oracle,
    plain,
    rounded,
    with_nan,
)
from lmcore_conformance.op.case import CASES, Case
from lmcore_conformance.op.findings import Use
from lmcore_conformance.registry import check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__ = ["each", "in_autocast", "made", "register_property", "regular", "two_dtypes"]

_HALF = ("bfloat16", "float16")
_SECONDS = 90.0

_WITH_WEIGHTS = {"layer_norm", "rms_norm", "linear", "bias_gelu"}
"""Ops that a model calls with an input in half precision and weights in float32, in autocast."""

InAutocast = tuple[Use, str, str, Callable[[], AbstractContextManager[object]], torch.dtype | None]
"""A use and, for `Findings.compare_in`, the end of its label, dtype, context, dtype of weights."""


def each(
    bench: Bench,
    op: str,
    kind: str = "value",
    *,
    dtypes: Iterable[str] = (),
    labels: tuple[str, ...] = ("",),
) -> Iterator[Use]:
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
        for number, case in enumerate(CASES[op]):
            if case.kind != kind or not case.label.startswith(labels):
                continue
            held, wanted = _right(op, number, name)
            for kernel in kernels:
                if kernel.does(bench.device.type, name, case.attributes):
                    yield Use(bench, kernel, held, name, wanted)


@lru_cache(maxsize=256)
def _right(op: str, number: int, name: str) -> tuple[Case, Outcome]:
    """Return a case rounded to a dtype, and its right result: many checks of an op ask for it."""
    case, dtype = CASES[op][number], getattr(torch, name)
    held = rounded(case if case.nan is None else with_nan(case), dtype)
    return held, oracle(held, dtype)


def regular(bench: Bench, op: str) -> Iterator[Use]:
    """Yield the regular cases in one dtype, as `each`."""
    return each(bench, op, dtypes=(next(dtypes_of(bench)),), labels=("regular",))


def made(
    bench: Bench,
    op: str,
    cases: Iterable[Case],
    dtypes: Iterable[str],
    layout: Callable[[Tensor], Tensor] = plain,
    given: str | None = None,
) -> Iterator[Use]:
    """Yield each kernel in *cases*, where it supports them with arguments of the dtype *given*.

    Arguments are rounded to each of *dtypes*, which *given* defaults to.
    """
    cases, kernels = list(cases), kernels_of(bench, op)
    for name in dtypes:
        dtype = getattr(torch, name)
        for exact in cases:
            able = [
                k for k in kernels if k.does(bench.device.type, given or name, exact.attributes)
            ]
            if not able:
                continue
            case = rounded(exact, dtype)
            wanted = oracle(case, dtype, layout)
            for kernel in able:
                yield Use(bench, kernel, case, name, wanted)


def in_autocast(bench: Bench, op: str) -> Iterator[InAutocast]:
    """Yield the regular and odd cases for each policy's autocast, with arguments of both dtypes."""
    cases = [case for case in CASES[op] if case.label in {"regular", "odd"}]
    for policy in bench.precision_policies:
        if policy.available() is not None:
            continue
        with policy.context():
            if not torch.is_autocast_enabled(bench.device.type):
                continue
            lower = dtype_name(torch.get_autocast_dtype(bench.device.type))
        if lower not in SPECS[op].tolerances:
            continue
        where = f"inside the autocast of `{policy.name}`"
        for given in sorted({"float32", lower} & set(dtypes_of(bench))):
            for use in made(bench, op, cases, [lower], given=given):
                yield use, f", arguments in {given}, {where}", given, policy.context, None
        if op in _WITH_WEIGHTS and "float32" in bench.device.dtypes:
            label = f", input in {lower}, weights in float32, {where}"
            for use in made(bench, op, cases, [lower]):
                yield use, label, lower, policy.context, torch.float32


def two_dtypes(bench: Bench) -> list[str]:
    """Return the first dtype of the device, and the first of its half precisions."""
    names = list(dtypes_of(bench))
    return names[:1] + [name for name in names if name in _HALF][:1]


def register_property(
    op: str,
    name: str,
    make: Callable[[Bench, str], str],
    title: str,
    reason: str,
    group: str = "ops",
    seconds: float = _SECONDS,
    option: str = "",
) -> None:
    """Register a check of an op, `ops.OP.NAME`.

    Args:
        op: Name of the op.
        name: Name of the property.
        make: Makes the check of an op.
        title: Title, with `{op}` for the op's name.
        reason: Reason of the check.
        group: Group of the check.
        seconds: Time limit.
        option: Option of the suite without which the check is not made.
    """

    def run(bench: Bench) -> str:
        return make(bench, op)

    run.__module__ = make.__module__
    text = title.format(op=op)
    check(
        f"ops.{op}.{name}",
        text,
        level="L2",
        reason=reason,
        group=group,
        seconds=seconds,
        option=option,
    )(run)
