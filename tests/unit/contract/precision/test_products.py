"""Counts of products on devices that cannot compute within a dispatch mode of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lmcore.base.errors import DeviceError
from lmcore.contract import full_precision_policy
from lmcore.contract.precision.products import counted_products
from lmcore_cpu.device import create_device


def within_mode() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def test_a_device_that_computes_only_without_the_mode(monkeypatch):
    """The error of every run and of `lmcore plugin check` names what the device lacks."""
    linear = functional.linear

    def failing(*tensors):
        if within_mode():
            raise RuntimeError("Input tensor is not a lazy tensor\nException raised from a file")
        return linear(*tensors)

    monkeypatch.setattr(functional, "linear", failing)
    with pytest.raises(DeviceError) as caught:
        full_precision_policy().verify(create_device())
    assert caught.value.what == "device `cpu` cannot compute within a `TorchDispatchMode`"
    assert "it raised RuntimeError: Input tensor is not a lazy tensor, and" in caught.value.why
    assert "docs/reference/device-requirements.md" in caught.value.hint
    assert "Input tensor is not" in str(caught.value.__cause__)


def test_a_device_that_cannot_compute_the_layers(monkeypatch):
    """A device that lacks an op of torch ends the run with its error, and no traceback."""

    def failing(*tensors):
        raise NotImplementedError("no `addmm` here\nC++ frames")

    monkeypatch.setattr(functional, "linear", failing)
    with pytest.raises(DeviceError) as caught:
        full_precision_policy().verify(create_device())
    assert caught.value.what == "device `cpu` cannot compute small layers under precision `fp32`"
    assert caught.value.why.startswith("NotImplementedError: no `addmm` here; projections")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("anyway"), DeviceError("anyway"), torch.OutOfMemoryError("anyway")]
)
def test_other_errors_stay_as_they_are(error):
    """An error that is also raised without the mode is no fault of the mode."""

    def compute(counter):
        with counter:
            raise error

    with pytest.raises(type(error)) as caught:
        counted_products(compute, "cpu")
    assert caught.value is error
