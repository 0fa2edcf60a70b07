"""The estimate of the curvature against the exact expectation, all labels enumerated."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

from lmcore.data.loading.batch import Batch
from lmcore.families.gpt.family import GPT
from lmcore.train.sophia_hessian import estimate_hessian, hessian_is_due
from lmcore.train.token_mean import TokenMean

FLAGS = (
    "--optimizer sophia --sophiag-beta2 0 --sophiag-hessian-interval 4 --num-layers 1 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3"
)


@pytest.fixture
def batch() -> Batch:
    """Return four tokens; the loss counts three of them."""
    tokens = torch.tensor([[5, 9, 2, 200]])
    return {
        "tokens_BS": tokens,
        "targets_BS": torch.zeros_like(tokens),
        "loss_weight_BS": torch.tensor([[1.0, 1.0, 0.0, 1.0]]),
    }


@pytest.fixture
def estimate(make_plan: Any, runtime: Any) -> Any:
    """Estimates from a batch."""

    def go(state: Any, batch: Batch, flags: str = "") -> None:
        norm = lambda grads: torch.stack([g.norm() for g in grads]).norm()  # noqa: E731
        mean = TokenMean(make_plan(f"{FLAGS} {flags}"), GPT, torch.device("cpu"))
        estimate_hessian(state, batch, mean, contextlib.nullcontext, norm, runtime)

    return go


def exact(state: Any, batch: Batch) -> dict[str, float]:
    """Sum over counted tokens and labels of p * g^2 / 3, by parameter, all entries summed."""
    model, tokens, weights = state.model, batch["tokens_BS"], batch["loss_weight_BS"]
    named = dict(model.named_parameters())
    found = dict.fromkeys(named, 0.0)
    hidden = model(tokens)
    log_probabilities = torch.log_softmax(model.logits(hidden)[..., :257], dim=-1)
    for place in weights[0].nonzero().flatten().tolist():
        for label in range(log_probabilities.shape[-1]):
            one = log_probabilities[0, place, label]
            gradients = torch.autograd.grad(one, list(named.values()), retain_graph=True)
            for name, gradient in zip(named, gradients, strict=True):
                found[name] += float(one.detach().exp() * gradient.square().sum()) / 3
    return found


@pytest.mark.parametrize("flags", ["", "--no-calculate-per-token-loss"])
def test_expectation(
    make_state: Any, make_plan: Any, estimate: Any, batch: Batch, flags: str
) -> None:
    """The mean of many estimates is the diagonal of the Gauss-Newton matrix, in each parameter."""
    state = make_state(make_plan(FLAGS))
    sums: dict[str, float] = {}
    count = 400
    for _ in range(count):
        estimate(state, batch, flags)
        for name, tensor in state.optimizer.state_tensors().items():
            if name.startswith("hessian."):
                sums[name] = sums.get(name, 0.0) + float(tensor.sum()) / count
    wanted = exact(state, batch)
    assert len(wanted) == len(sums)
    for name, value in wanted.items():
        assert sums[f"hessian.{name}"] == pytest.approx(value, rel=0.2, abs=1e-6), name


def test_labels_are_drawn_from_the_prediction(make_state: Any, make_plan: Any) -> None:
    """Frequencies of sampled targets are the model's probabilities."""
    state = make_state(make_plan(FLAGS))
    hidden = state.model(torch.tensor([[5, 9]])).detach()
    chances = torch.softmax(state.model.logits(hidden)[..., :257], dim=-1)[0, 1]
    drawn = state.model.sampled_targets(hidden[:, 1:].expand(1, 20_000, -1))
    assert drawn.shape == (1, 20_000)
    seen = torch.bincount(drawn[0], minlength=len(chances)) / 20_000
    error = (chances * (1 - chances) / 20_000).sqrt()
    assert ((seen - chances).abs() < 5 * error + 1e-4).all()
    assert seen.max() > 0.01


def test_scale_of_the_loss_does_not_count(
    make_state: Any, make_plan: Any, estimate: Any, batch: Batch
) -> None:
    """Gradients that are scaled, as in fp16, give the same curvature."""
    found = []
    for scale in (1.0, 1024.0):
        state = make_state(make_plan(FLAGS))
        state.loss_scale.value = scale
        estimate(state, batch)
        found.append(state.optimizer.state_tensors())
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("weight", [math.inf, 0.0])
def test_no_estimate(
    make_state: Any, make_plan: Any, estimate: Any, batch: Batch, weight: float
) -> None:
    """Gradients that are not finite, or of no valid target, leave the estimate as it is."""
    state = make_state(make_plan(FLAGS))
    estimate(state, batch)
    before = {name: t.clone() for name, t in state.optimizer.state_tensors().items()}
    spoiled = torch.full_like(batch["loss_weight_BS"], weight)
    estimate(state, batch | {"loss_weight_BS": spoiled})
    after = state.optimizer.state_tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_due_by_the_steps_that_updated(make_state: Any, make_plan: Any) -> None:
    """Skipped steps do not count; optimizers without curvature want none."""
    state = make_state(make_plan(FLAGS))
    due = []
    for state.iteration in range(6):
        due.append(hessian_is_due(state))
    state.iteration, state.skipped_iterations = 6, 2
    assert [*due, hessian_is_due(state)] == [True, False, False, False, True, False, True]
    assert not hessian_is_due(make_state(make_plan("")))
