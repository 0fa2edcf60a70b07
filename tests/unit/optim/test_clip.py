"""Clipping against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lmcore.optim.clip import clip_by_norm, clip_by_norm_on_device


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in ((5, 7), (3,), (2, 2, 2))]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([one.flatten() for one in tensors])))


@pytest.mark.parametrize("limit", [0.01, 1.0, 5.0, 1e6])
def test_matches_torch(limit: float) -> None:
    """The clipped gradients match `clip_grad_norm_`, above the limit and below it."""
    ours = gradients()
    theirs = [nn.Parameter(torch.zeros_like(one)) for one in ours]
    for parameter, gradient in zip(theirs, gradients(), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(theirs, limit)
    clip_by_norm(ours, norm_of(ours), limit)
    assert float(norm) == pytest.approx(norm_of(gradients()))
    for one, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=0.0)


def test_limit_holds() -> None:
    """Above the limit the norm becomes the limit; the direction stays."""
    ours, before = gradients(), gradients()
    clip_by_norm(ours, norm_of(ours), 0.5)
    assert norm_of(ours) == pytest.approx(0.5, rel=1e-5)
    cosine = sum(float((a * b).sum()) for a, b in zip(ours, before, strict=True))
    assert cosine == pytest.approx(0.5 * norm_of(before), rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 1e6])
def test_left_alone(limit: float) -> None:
    """No limit, or a norm below it, changes no bit."""
    ours = gradients()
    clip_by_norm(ours, norm_of(ours), limit)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(), strict=True))


def test_zero_gradients() -> None:
    """Gradients of zero stay zero."""
    zeros = [torch.zeros(3)]
    clip_by_norm(zeros, 0.0, 1.0)
    assert torch.equal(zeros[0], torch.zeros(3))


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_loss_scale(limit: float) -> None:
    """The scale is divided out in the same pass, clipped or not, to the same bits."""
    plain, scaled = gradients(), [one * 2.0**20 for one in gradients()]
    clip_by_norm(plain, norm_of(gradients()), limit)
    clip_by_norm(scaled, norm_of(gradients()), limit, loss_scale=2.0**20)
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.3, 1.0, 1e6])
def test_on_the_device(limit: float) -> None:
    """By a norm that stays on the device the bits are the same, of many norms."""
    for number in range(50):
        ours, theirs = ([one * 1.1**number for one in gradients()] for _ in range(2))
        square = sum(one.double().square().sum() for one in ours).float()
        clip_by_norm(ours, math.sqrt(float(square)), limit)
        clip_by_norm_on_device(theirs, square.double().sqrt(), limit)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("limit", [0.0, 0.3, 1e6])
def test_divisor_on_the_device(limit: float) -> None:
    """A divisor is divided out in the same pass, as the loss scale is on the host."""
    plain, divided = gradients(), [one * 0.75 for one in gradients()]
    norm = norm_of(divided)
    clip_by_norm(plain, norm / 0.75, limit)
    wide = torch.tensor(norm, dtype=torch.float64)
    clip_by_norm_on_device(divided, wide, limit, divisor=torch.tensor(0.75, dtype=torch.float64))
    for one, other in zip(divided, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-7, atol=0)


def test_not_finite_on_the_device() -> None:
    """A norm that is not finite is not hidden: the gradients are not finite either."""
    ours = gradients()
    clip_by_norm_on_device(ours, torch.tensor(math.nan), 1.0)
    assert not any(bool(torch.isfinite(one).any()) for one in ours)
    clip_by_norm_on_device([], torch.tensor(1.0), 1.0)
