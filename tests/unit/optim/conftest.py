"""Weights and gradients that all tests of optimizers share, and a way to run one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmcore.config.section.optimizer import OptimizerSection
from lmcore.contract import OP_SPECS
from lmcore.contract.op.records import load_target
from lmcore.optim.create import create_optimizer

ADAMW = load_target(next(spec.reference for spec in OP_SPECS if spec.name == "adamw"))
SHAPES = {
    "token_embedding.weight": (67, 64),
    "blocks.0.norm.weight": (64,),
    "blocks.0.up.weight": (80, 64),
    "blocks.0.up_bias": (80,),
    "blocks.0.down.weight": (64, 48),
}


def weights(seed: int = 1) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Return gradients of changing size; some entries are zero."""
    generator = torch.Generator().manual_seed(100 + step)
    scale = 10.0 ** (step % 4 - 2)
    made = {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}
    made["token_embedding.weight"][3] = 0.0
    return made


def rate(step: int) -> float:
    """Return the rate of a warm-up of two steps, then a decay."""
    return 1e-2 * min(1.0, (step + 1) / 2) / (1 + step)


def make(optimizer: str, named: dict[str, nn.Parameter], **settings: Any) -> Any:
    """Return what `create_optimizer` makes of the settings."""
    common = {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    sum_over_shards = settings.pop("sum_over_shards", None)
    section = dataclasses.replace(
        OptimizerSection(), **(common | {"optimizer": optimizer} | settings)
    )
    return create_optimizer(
        section, named.items(), bind=lambda op: ADAMW, sum_over_shards=sum_over_shards
    )


def advance(named: dict[str, nn.Parameter], optimizer: Any, steps: range) -> None:
    """Take steps as a run does, the estimate of the curvature included."""
    for step in steps:
        if optimizer.hessian_interval and step % optimizer.hessian_interval == 0:
            for name, gradient in gradients(1000 + step).items():
                named[name].grad = gradient * 0.01
            optimizer.update_hessian(32)
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        optimizer.step(rate(step))


@dataclasses.dataclass(frozen=True)
class Bench:
    """Functions that the tests use."""

    weights: Callable[..., dict[str, nn.Parameter]] = weights
    gradients: Callable[[int], dict[str, torch.Tensor]] = gradients
    rate: Callable[[int], float] = rate
    make: Callable[..., Any] = make
    advance: Callable[..., None] = advance
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = tuple(SHAPES.items())

    def check(
        self,
        optimizer: str,
        formula: Callable[[str, Any, Any, float, int, dict[str, Any]], Any],
        *,
        steps: int = 9,
        tolerance: float = 1e-5,
        **settings: Any,
    ) -> None:
        """Compare steps with a formula in float64.

        Args:
            optimizer: Its name.
            formula: Given a parameter's name, weight, gradient, rate, number of the step from 1
                and its own dict, returns the new weight.
            steps: Number of steps.
            tolerance: Largest difference, absolute; weights are of size 1.
            settings: Settings of the optimizer's section.
        """
        named = self.weights()
        made = self.make(optimizer, named, **settings)
        exact = {name: p.detach().numpy().astype(np.float64) for name, p in named.items()}
        kept: dict[str, dict[str, Any]] = {name: {} for name in named}
        for step in range(steps):
            self.advance(named, made, range(step, step + 1))
            for name, gradient in self.gradients(step).items():
                wide = gradient.numpy().astype(np.float64)
                exact[name] = formula(
                    name, exact[name], wide, self.rate(step), step + 1, kept[name]
                )
        moved = 0.0
        start = self.weights()
        for name, parameter in named.items():
            found = parameter.detach().numpy()
            np.testing.assert_allclose(found, exact[name], rtol=0, atol=tolerance, err_msg=name)
            moved = max(moved, float(np.abs(found - start[name].detach().numpy()).max()))
        assert moved > 50 * tolerance, "the weights have hardly moved: this compares nothing"


@pytest.fixture
def bench() -> Bench:
    """Weights, gradients and a way to run an optimizer on them."""
    return Bench()
