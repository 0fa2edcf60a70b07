"""The validation loss against a plain mean; what it leaves alone, and when it stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.validation import Validation, perplexity, validate

FLAGS = "--eval-iters 2 --eval-interval 4 --global-batch-size 8 --split 80,20,0"


@pytest.fixture
def parts(make_plan: Any, make_state: Any, make_datasets: Any) -> Any:
    """Plan, state with dropout, and corpus."""
    plan = make_plan(f"{FLAGS} --hidden-dropout 0.5 --attention-dropout 0.5")
    return plan, make_state(plan), make_datasets(plan)


def plain_mean(state: Any, samples: list[Any]) -> float:
    """Return the mean over all tokens, one sample at a time, in float64."""
    state.model.eval()
    losses = []
    for sample in samples:
        tokens = torch.from_numpy(np.asarray(sample))[None]
        logits = state.model.logits(state.model(tokens[:, :-1])).detach().double()
        losses.append(torch.nn.functional.cross_entropy(logits[0, :, :257], tokens[0, 1:]).item())
    state.model.train()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("first", [0, 16])
def test_mean(parts: Any, runtime: Any, first: int) -> None:
    """It is the mean over the asked samples, without dropout."""
    plan, state, corpus = parts
    found = validate(
        state.parallel, corpus.valid, plan, runtime, collation=corpus.collation, first_sample=first
    )
    assert found is not None
    assert found.samples == 16
    wanted = plain_mean(state, [corpus.valid[first + i] for i in range(16)])
    assert found.loss == pytest.approx(wanted, rel=1e-6)


def test_leaves_the_run_alone(parts: Any, runtime: Any) -> None:
    """Training mode, weights, gradients and random states are as before."""
    plan, state, corpus = parts
    state.model.train()
    before = torch.get_rng_state(), state.model.final_norm.weight.detach().clone()
    validate(
        state.parallel, corpus.valid, plan, runtime, collation=corpus.collation, first_sample=0
    )
    assert state.model.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(state.model.final_norm.weight, before[1])
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_numbers_drawn_meanwhile(parts: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that draws random numbers also in evaluation does not disturb training."""
    plan, state, corpus = parts
    loss = state.model.loss
    monkeypatch.setattr(
        state.model, "loss", lambda **batch: torch.rand(3).sum() * 0 + loss(**batch)
    )
    before = torch.get_rng_state()
    validate(
        state.parallel, corpus.valid, plan, runtime, collation=corpus.collation, first_sample=0
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_stop(parts: Any, runtime: Any) -> None:
    """A run that is to exit gets no partial validation, and continues in training mode."""
    plan, state, corpus = parts
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    found = validate(
        state.parallel,
        corpus.valid,
        plan,
        runtime,
        collation=corpus.collation,
        first_sample=0,
        stop=stop,
    )
    assert found is None
    assert len(asked) == 3
    assert state.model.training


def test_not_finite(parts: Any, runtime: Any) -> None:
    """A loss of NaN is an error that names the sample, and not a row of NaN."""
    plan, state, corpus = parts
    with torch.no_grad():
        state.model.final_norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="validation loss is nan at validation sample 8"):
        validate(
            state.parallel, corpus.valid, plan, runtime, collation=corpus.collation, first_sample=8
        )
    assert state.model.training


def test_perplexity() -> None:
    """It is exp(loss), with the exponent held at 20."""
    assert perplexity(2.0) == pytest.approx(math.e**2)
    assert perplexity(25.0) == math.exp(20.0)
    assert Validation({"lm_loss": 0.0}, 4).perplexity == 1.0
    assert Validation({"lm_loss": 0.0, "sop_loss": 3.0}, 4).perplexity == 1.0
    assert Validation({"classification_loss": 1.0}, 4).perplexity is None
