"""Comparison of the optimizer's parameters with the weights of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcore.conversion.megatron.optimizer.moments import is_rounded, require_rounded
from lmcore.conversion.state import OptimizerStateError


def test_a_rounded_parameter_fits() -> None:
    """So does one with NaN at the same places."""
    main = torch.tensor([1.0, 1 / 3, float("nan")])
    assert is_rounded(main, main.bfloat16())
    assert not is_rounded(main, main.bfloat16() + 1)


def test_another_shape_does_not_fit() -> None:
    """The files of a universal checkpoint and of the model may be of two models."""
    with pytest.raises(OptimizerStateError, match="does not fit the model"):
        require_rounded(Path("run"), "a", torch.ones(4, 2), torch.ones(3, 2))
