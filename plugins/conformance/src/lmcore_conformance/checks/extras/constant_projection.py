"""Level 5: `Device.constant_projection`, projections by weights that do not change.

Shapes: M rows, I inputs, O outputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import counted
from lmcore.contract import ConstantProjection, QuantizedWeight
from lmcore.contract.dtype import dtype_name
from lmcore_conformance.case_findings import CaseFindings
from lmcore_conformance.op.call import SPECS, difference, dtypes_of
from lmcore_conformance.registry import check

if TYPE_CHECKING:
    from lmcore.contract.generation_kernels import Projection
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L5", group="device", requires=["constant_projection"])

_SIZES = ((64, 48), (256, 160), (37, 5))
"""Inputs and outputs of weights."""
_QUANTIZED = ((64, 48, 64), (64, 48, 32), (256, 160, 256), (256, 160, 128), (40, 6, 40))
"""Inputs, outputs and inputs of a group of quantized weights."""
_WIDE = (8192, 6)
_WIDE_QUANTIZED = (*_WIDE, 32)
"""256 groups."""
_ROWS = ((1,), (3,), (2, 3), (130,))
"""Leading dims of the rows."""
_FEW_ROWS = ((1,), (4,))
"""Leading dims of the rows for wide weights."""
_GELU = "gelu_tanh"
_HUGE = 1e4


@dataclass(frozen=True)
class _Case:
    """A projection, and its exact weight.

    Attributes:
        wanted: The projection, with its weight on the device.
        exact_OI: The weight in float64 on the host.
        bias_O: Bias in float64 on the host; None: none.
        compute: Dtype of the weight or of its scales.
    """

    wanted: ConstantProjection
    exact_OI: Tensor
    bias_O: Tensor | None
    compute: str

    @property
    def label(self) -> str:
        """The case, in words."""
        weight, (outputs, inputs) = self.wanted.weight_OI, self.exact_OI.shape
        text = f"{inputs} to {outputs} in {self.compute}"
        if isinstance(weight, QuantizedWeight):
            offset = "" if weight.offset_OG is None else " and offsets"
            text += f", {weight.bits} bits, groups of {weight.group_size}{offset}"
        parts = (
            "" if self.bias_O is None else "bias",
            self.wanted.activation or "",
            f"output {dtype_name(self.wanted.output)}",
            f"usually {counted(self.wanted.rows, 'row')}",
        )
        return ", ".join((text, *filter(None, parts)))

    @property
    def tolerance(self) -> str:
        """Dtype whose tolerance the outputs have: the less precise of compute and output."""
        names = (self.compute, dtype_name(self.wanted.output))
        return max(names, key=lambda name: SPECS["linear"].tolerances[name].relative)

    def expected(self, x_MI: Tensor) -> Tensor:
        """Return the outputs in float64."""
        y_MO = functional.linear(x_MI, self.exact_OI, self.bias_O)
        return y_MO if self.wanted.activation is None else functional.gelu(y_MO, approximate="tanh")


def _input(bench: Bench, *shape: int, seed: int = 11) -> Tensor:
    """Return numbers in float64 that every dtype of the checks has, so that none is rounded."""
    return bench.values(*shape, seed=seed).to(torch.bfloat16).double()


def _variants(
    bench: Bench, weight: Tensor | QuantizedWeight, exact_OI: Tensor, compute: str
) -> Iterator[_Case]:
    """Yield projections by a weight: with and without bias and GELU, to several dtypes."""
    dtype = getattr(torch, compute)
    given_O = bench.values(exact_OI.shape[0], seed=7).to(dtype).double()
    for bias, activation, output, rows in (
        (False, None, compute, 1),
        (True, None, compute, 8),
        (False, _GELU, compute, 8),
        (True, _GELU, compute, 1),
        (True, None, "float32", 8),
        (False, None, "bfloat16", 1),
    ):
        if output in bench.device.dtypes:
            bias_O = given_O if bias else None
            sent_O = given_O.to(bench.torch_device, dtype) if bias else None
            outputs = getattr(torch, output)
            wanted = ConstantProjection(weight, sent_O, outputs, rows, activation)
            yield _Case(wanted, exact_OI, bias_O, compute)


def _plain(bench: Bench) -> Iterator[_Case]:
    for compute, (inputs, outputs) in itertools.product(dtypes_of(bench), (*_SIZES, _WIDE)):
        weight_OI = bench.values(outputs, inputs, seed=3).to(getattr(torch, compute))
        weight_OI /= inputs**0.5
        yield from _variants(bench, weight_OI.to(bench.torch_device), weight_OI.double(), compute)


def _quantized(bench: Bench) -> Iterator[_Case]:
    for compute, bits, sizes, offset in itertools.product(
        dtypes_of(bench), (8, 4), _QUANTIZED, (False, True)
    ):
        weight, exact_OI = quantized_weight(bench, compute, bits, *sizes, offset=offset)
        yield from _variants(bench, weight, exact_OI, compute)
    for compute, bits in itertools.product(dtypes_of(bench), (8, 4)):
        weight, exact_OI = quantized_weight(bench, compute, bits, *_WIDE_QUANTIZED, offset=True)
        yield from _variants(bench, weight, exact_OI, compute)


def quantized_weight(
    bench: Bench, compute: str, bits: int, inputs: int, outputs: int, group: int, *, offset: bool
) -> tuple[QuantizedWeight, Tensor]:
    """Return a quantized weight on the device, and the same in float64 on the host.

    Args:
        bench: Device.
        compute: Dtype of the scales.
        bits: Bits of a value.
        inputs, outputs: Sizes of the weight.
        group: Inputs that share a scale.
        offset: True if the groups have offsets.
    """
    dtype, device = getattr(torch, compute), bench.torch_device
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    generator = torch.Generator().manual_seed(bits)
    values_OI = torch.randint(
        lowest, highest + 1, (outputs, inputs), generator=generator, dtype=torch.int8
    )
    shape = (outputs, inputs // group)
    size = 1.0 / (highest * inputs**0.5)
    scale_OG = ((1.0 + bench.values(*shape, seed=4).abs()) * size).to(dtype)
    offset_OG = (bench.values(*shape, seed=5) / inputs**0.5).to(dtype) if offset else None
    exact_OI = values_OI.double() * scale_OG.double().repeat_interleave(group, 1)
    if offset_OG is not None:
        exact_OI += offset_OG.double().repeat_interleave(group, 1)
    sent = (
        values_OI.to(device),
        scale_OG.to(device),
        None if offset_OG is None else offset_OG.to(device),
    )
    return QuantizedWeight(bits, *sent), exact_OI


def _make(bench: Bench, case: _Case, found: CaseFindings) -> Projection | None:
    """Return the device's function; None, and counted, if it has none."""
    make = bench.device.constant_projection
    assert make is not None
    project = make(case.wanted)
    if project is None:
        found.refused += 1
    else:
        found.tried += 1
    return project


def _with_gaps(x_MI: Tensor) -> Tensor:
    """Return the rows as a part of a larger tensor, with gaps between them."""
    inputs = x_MI.shape[-1]
    return functional.pad(x_MI, (0, inputs))[..., :inputs]


def _with_uneven_gaps(x_NMI: Tensor) -> Tensor:
    """Return the rows as a part of each matrix of a larger tensor: no single stride has them."""
    return functional.pad(x_NMI, (0, 0, 0, 2))[:, : x_NMI.shape[1]]


def _faults(bench: Bench, case: _Case, project: Projection) -> Iterator[str]:
    """Yield what is wrong in calls of a projection."""
    inputs = case.exact_OI.shape[1]
    all_rows = _FEW_ROWS if inputs == _WIDE[0] else _ROWS
    kept: list[tuple[Tensor, Tensor]] = []
    for shape in all_rows:
        for name in dict.fromkeys((case.compute, "float32")):
            if name not in bench.device.dtypes:
                continue
            x_MI = _input(bench, *shape, inputs, seed=len(kept))
            given = x_MI.to(bench.torch_device, getattr(torch, name))
            if given.dim() > 2:
                given = _with_uneven_gaps(given)
            elif len(kept) % 3 == 1:
                given = _with_gaps(given)
            y_MO, wanted_MO = project(given), case.expected(x_MI)
            rows = f"rows {tuple(shape)} in {name}"
            if y_MO.dtype != case.wanted.output:
                yield f"{rows}: the output is {y_MO.dtype}, not {case.wanted.output}"
            wrong = difference(bench.host(y_MO), wanted_MO, "linear", case.tolerance)
            if wrong:
                yield f"{rows}: the output {wrong}"
            if not torch.equal(bench.host(given), x_MI):
                yield f"{rows}: the input was changed"
            kept.append((y_MO, wanted_MO))
    if any(
        difference(bench.host(found), wanted, "linear", case.tolerance) for found, wanted in kept
    ):
        yield "later calls changed the output of an earlier one"


def _values(bench: Bench, cases: Iterator[_Case]) -> str:
    found = CaseFindings()
    with torch.no_grad():
        for case in cases:
            with found.case(case.label):
                project = _make(bench, case, found)
                if project is not None:
                    found.add(case.label, next(_faults(bench, case, project), None))
    return found.conclude()


@_check(
    "extras.constant-projection",
    "`constant_projection` returns functions that compute `activation(x @ weight.T + bias)`, for"
    " any number of rows in any floating-point dtype, also with gaps between them, in the output"
    " dtype; or it is None.",
    reason="Generation replaces all projections of a model by them.",
    seconds=120,
)
def constant_projection(bench: Bench) -> str:
    """Compare outputs with float64, in every dtype of the device."""
    return _values(bench, _plain(bench))


@_check(
    "extras.quantized-projection",
    "`constant_projection` of weights of 8 and 4 bits computes with `values * scale + offset`, with"
    " one scale for each output or for each group of inputs; or it is None.",
    reason="With `--quantization` the projections and the head have such weights.",
    seconds=120,
)
def quantized_projection(bench: Bench) -> str:
    """Compare outputs with float64, for each dtype of scales."""
    return _values(bench, _quantized(bench))


@_check(
    "extras.projection-rows",
    "A row of `constant_projection` does not depend on finite numbers in other rows; with quantized"
    " weights, it does not depend on NaN in them either.",
    reason="Sequences that are decoded together must not change each other.",
    seconds=120,
)
def projection_rows(bench: Bench) -> str:
    """Put huge numbers and NaN into some rows, and compare the others with float64.

    NaN is for quantized weights alone: some libraries' products of bfloat16 spread it.
    """
    found = CaseFindings()
    with torch.no_grad():
        for case in itertools.chain(_plain(bench), _quantized(bench)):
            with found.case(case.label):
                project = _make(bench, case, found)
                if project is not None:
                    found.add(case.label, _row_fault(bench, case, project))
    return found.conclude()


def _row_fault(bench: Bench, case: _Case, project: Projection) -> str | None:
    """Return what is wrong in rows between others of huge numbers and of NaN."""
    neighbours = {"huge numbers": _HUGE}
    if isinstance(case.wanted.weight_OI, QuantizedWeight):
        neighbours["NaN"] = float("nan")
    for name, neighbour in neighbours.items():
        x_MI = _input(bench, 5, case.exact_OI.shape[1])
        wanted_MO = case.expected(x_MI)[::2]
        x_MI[1::2] *= neighbour
        y_MO = bench.host(project(x_MI.to(bench.torch_device, getattr(torch, case.compute))))
        wrong = difference(y_MO[::2], wanted_MO, "linear", case.tolerance)
        if wrong:
            return f"beside rows with {name} a row {wrong}"
    return None


@_check(
    "extras.projection-refusals",
    "`constant_projection` returns None for an activation that it does not include.",
    reason="The core asks again without the activation, and computes that itself.",
)
def projection_refusals(bench: Bench) -> str:
    """Ask for an activation that does not exist, by weights of each kind."""
    found = CaseFindings()
    for case in itertools.chain(_plain(bench), _quantized(bench)):
        if case.wanted.activation is not None or case.bias_O is not None:
            continue
        unknown = replace(case, wanted=replace(case.wanted, activation="no-such-activation"))
        with found.case(unknown.label):
            if _make(bench, unknown, found) is not None:
                found.add(unknown.label, "there is a function, and it cannot include this")
    return found.conclude()
