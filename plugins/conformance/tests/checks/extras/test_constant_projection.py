"""Checks of projections by constant weights, which find each fault and none in right kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.contract import ConstantProjection, QuantizedWeight

CHECKS = {
    "extras.constant-projection",
    "extras.quantized-projection",
    "extras.projection-rows",
    "extras.projection-refusals",
}
KEPT: list[Tensor] = []


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    """Return the weight in float64."""
    if not isinstance(weight, QuantizedWeight):
        return weight.double()
    group = weight.group_size
    wide = weight.values_OI.double() * weight.scale_OG.double().repeat_interleave(group, 1)
    if weight.offset_OG is None:
        return wide
    return wide + weight.offset_OG.double().repeat_interleave(group, 1)


def product(x: Tensor, wanted: ConstantProjection, weight: Tensor | None = None) -> Tensor:
    """Return the outputs in float64, without the activation."""
    bias = None if wanted.bias_O is None else wanted.bias_O.double()
    return functional.linear(
        x.double(), dense(wanted.weight_OI) if weight is None else weight, bias
    )


def right(wanted: ConstantProjection) -> Any:
    """Make the projection as the contract says."""
    if wanted.activation not in {None, "gelu_tanh"}:
        return None

    def project(x: Tensor) -> Tensor:
        y = product(x, wanted)
        y = y if wanted.activation is None else functional.gelu(y, approximate="tanh")
        return y.to(wanted.output)

    return project


def without_activation(wanted: ConstantProjection) -> Any:
    """Answer None for each activation, which the core computes then."""
    return None if wanted.activation else right(wanted)


def nothing(wanted: ConstantProjection) -> Any:
    """Have no kernel."""


def no_bias(wanted: ConstantProjection) -> Any:
    return without_activation(
        ConstantProjection(wanted.weight_OI, None, wanted.output, 1, wanted.activation)
    )


def other_gelu(wanted: ConstantProjection) -> Any:
    if wanted.activation != "gelu_tanh":
        return right(wanted)
    return lambda x: functional.gelu(product(x, wanted)).to(wanted.output)


def includes_everything(wanted: ConstantProjection) -> Any:
    return right(wanted) or (lambda x: product(x, wanted).to(wanted.output))


def other_output(wanted: ConstantProjection) -> Any:
    return (project := right(wanted)) and (lambda x: project(x).float())


def one_row(wanted: ConstantProjection) -> Any:
    """Compute the first row alone."""

    def project(x: Tensor) -> Tensor:
        y = right(wanted)(x).clone()
        y.flatten(0, -2)[1:] = 0
        return y

    return right(wanted) and project


def ignores_gaps(wanted: ConstantProjection) -> Any:
    """Read rows as if they were side by side in memory."""

    def project(x: Tensor) -> Tensor:
        return right(wanted)(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))

    return right(wanted) and project


def views_rows(wanted: ConstantProjection) -> Any:
    """Take a view of all rows, which exists if one stride has them."""
    return (project := right(wanted)) and (
        lambda x: project(x.view(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
    )


def changes_input(wanted: ConstantProjection) -> Any:
    def project(x: Tensor) -> Tensor:
        y = right(wanted)(x)
        x.mul_(2)
        return y

    return right(wanted) and project


def reuses_output(wanted: ConstantProjection) -> Any:
    """Return every output in the same memory."""
    buffer = torch.empty(2**16, dtype=wanted.output)

    def project(x: Tensor) -> Tensor:
        y = right(wanted)(x)
        return buffer[: y.numel()].view(y.shape).copy_(y)

    return right(wanted) and project


def rounds_weight(wanted: ConstantProjection) -> Any:
    """Compute float32 in bfloat16."""
    return right(wanted) and (
        lambda x: (
            product(x, wanted, dense(wanted.weight_OI).bfloat16().double()).to(wanted.output)
            if wanted.activation is None
            else right(wanted)(x)
        )
    )


def no_offsets(wanted: ConstantProjection) -> Any:
    weight = wanted.weight_OI
    if isinstance(weight, QuantizedWeight):
        weight = QuantizedWeight(weight.bits, weight.values_OI, weight.scale_OG)
    return right(ConstantProjection(weight, wanted.bias_O, wanted.output, 1, wanted.activation))


def few_offsets(wanted: ConstantProjection) -> Any:
    """Drop the offsets of the groups from 128 on, with 4 bits."""
    weight = wanted.weight_OI
    if isinstance(weight, QuantizedWeight) and weight.bits == 4 and weight.offset_OG is not None:
        offset = weight.offset_OG.clone()
        offset[:, 128:] = 0
        weight = QuantizedWeight(4, weight.values_OI, weight.scale_OG, offset)
    return right(ConstantProjection(weight, wanted.bias_O, wanted.output, 1, wanted.activation))


def few_inputs(wanted: ConstantProjection) -> Any:
    """Read the first 4,096 inputs of a row."""
    return right(wanted) and (
        lambda x: right(wanted)(functional.pad(x[..., :4096], (0, max(0, x.shape[-1] - 4096))))
    )


def one_scale(wanted: ConstantProjection) -> Any:
    """Use the scale of the first group for all."""
    weight = wanted.weight_OI
    if isinstance(weight, QuantizedWeight):
        scale = weight.scale_OG[:, :1].expand_as(weight.scale_OG)
        weight = QuantizedWeight(weight.bits, weight.values_OI, scale, weight.offset_OG)
    return right(ConstantProjection(weight, wanted.bias_O, wanted.output, 1, wanted.activation))


def raises(wanted: ConstantProjection) -> Any:
    if isinstance(wanted.weight_OI, QuantizedWeight) and wanted.weight_OI.bits == 4:
        raise NotImplementedError("no products of 4 bits")
    return right(wanted)


def leaks(wanted: ConstantProjection) -> Any:
    """Add zero times all rows: nothing unless one of them is not finite."""
    return (project := right(wanted)) and (
        lambda x: project(x + 0 * x.flatten(0, -2).sum(0).to(x.dtype))
    )


def shares_scale(wanted: ConstantProjection) -> Any:
    """Round the inputs to steps of the largest one, fine unless it is huge."""
    if (project := right(wanted)) is None:
        return None

    def rounded(x: Tensor) -> Tensor:
        largest = x.double().abs().nan_to_num().max()
        if largest < 100:
            return project(x)
        return project(((x.double() / largest * 127).round() * largest / 127).to(x.dtype))

    return rounded


@pytest.mark.parametrize("make", [right, without_activation, nothing])
def test_what_is_right_passes(findings: Callable[..., Any], make: Any) -> None:
    """Activations may be left out, and so may be all kernels."""
    for name in sorted(CHECKS):
        assert findings(name, constant_projection=make) == ()


def test_the_hosts_own_pass(findings: Callable[..., Any]) -> None:
    """The CPU plugin's kernels are right."""
    for name in sorted(CHECKS):
        assert findings(name) == ()


@pytest.mark.parametrize(
    "make, name, message",
    [
        (no_bias, "extras.constant-projection", "times the tolerance"),
        (no_bias, "extras.quantized-projection", "times the tolerance"),
        (other_gelu, "extras.constant-projection", "times the tolerance"),
        (other_output, "extras.constant-projection", "is torch.float32, not torch.bfloat16"),
        (one_row, "extras.constant-projection", "rows (3,) in float32: the output has 0 where"),
        (ignores_gaps, "extras.constant-projection", "times the tolerance"),
        (views_rows, "extras.constant-projection", "it raised RuntimeError: view size is not"),
        (changes_input, "extras.constant-projection", "the input was changed"),
        (reuses_output, "extras.constant-projection", "later calls changed the output of an"),
        (rounds_weight, "extras.constant-projection", "in float32, output float32"),
        (no_offsets, "extras.quantized-projection", "8 bits, groups of 64 and offsets"),
        (few_offsets, "extras.quantized-projection", "8192 to 6 in float32, 4 bits, groups of 32"),
        (few_inputs, "extras.constant-projection", "8192 to 6 in float32"),
        (few_inputs, "extras.quantized-projection", "8192 to 6 in float32, 8 bits"),
        (one_scale, "extras.quantized-projection", "8 bits, groups of 32, output"),
        (raises, "extras.quantized-projection", "it raised NotImplementedError: no products of 4"),
        (leaks, "extras.projection-rows", "groups of 64, output"),
        (leaks, "extras.projection-rows", "beside rows with NaN a row is finite where it should"),
        (shares_scale, "extras.projection-rows", "64 to 48 in float32, output float32, usually 1"),
        (shares_scale, "extras.projection-rows", "beside rows with huge numbers a row has"),
        (includes_everything, "extras.projection-refusals", "it cannot include this"),
    ],
)
def test_a_fault_is_found(findings: Callable[..., Any], make: Any, name: str, message: str) -> None:
    """The check that is about it says what is wrong, and in which case."""
    found = findings(name, constant_projection=make)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    "make, broken",
    [
        (no_offsets, {"extras.quantized-projection", "extras.projection-rows"}),
        (leaks, {"extras.projection-rows"}),
        (includes_everything, {"extras.projection-refusals"}),
    ],
)
def test_other_checks_pass(findings: Callable[..., Any], make: Any, broken: set[str]) -> None:
    """A check that is not about the fault has no findings."""
    assert {name for name in CHECKS if findings(name, constant_projection=make)} == broken
