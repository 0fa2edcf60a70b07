"""Comparison of layouts, on runs that differ."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.parallel.tensor_layout import TensorLayout
from lmcore_conformance.checks.distributed.layouts import _largest, _weights_off
from lmcore_conformance.registry import Failure
from lmcore_conformance.tiny_run import Trained


def trained(*weights: list[float]) -> Trained:
    tensors = {f"model.{place}": torch.tensor(values) for place, values in enumerate(weights)}
    layouts = {name: TensorLayout.whole(tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Trained([], [], tensors, {}, layouts)


def test_farthest_weight() -> None:
    """It is looked for in every tensor."""
    assert _weights_off(trained([1.0, 2.0], [3.0]), trained([1.0, 2.5], [2.0])) == 1.0
    with pytest.raises(Failure, match=r"`model.0` is \(1,\) in parts, and \(2,\) whole"):
        _weights_off(trained([1.0]), trained([1.0, 2.0]))


@pytest.mark.parametrize("places", [(0.5, math.nan), (math.nan, 0.5), (math.inf, math.nan)])
def test_nan_is_the_farthest(places: tuple[float, float]) -> None:
    """A NaN at any place is found."""
    assert math.isnan(_largest(places))
    assert math.isnan(_weights_off(trained([places[0]], [places[1]]), trained([0.0], [0.0])))
