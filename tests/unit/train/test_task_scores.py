"""Scores of tasks by the model in training: shapes of passes, what is left alone, bad weights."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.evaluation.likelihood import Scored
from lmcore.evaluation.run import AskedTask
from lmcore.evaluation.task import Continued, Task
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.task_scores import TaskEvaluator

REQUESTS = [
    Scored((7, 8), (9,)),
    Scored((1,), tuple(range(2, 90))),
    Scored(tuple(range(60)), (5, 6, 7)),
    Scored((3,), (4, 5)),
]
TASK = Task("ends", "Ends.", ("ends*",), lambda _path: iter(()), ("acc", "perplexity"), "me")


@pytest.fixture
def scorer(make_plan: Any, make_state: Any, tokenizer: Any, runtime: Any) -> Any:
    """Make an evaluator of a run with dropout; return it and the run's state."""

    def make(flags: str = "", *, signalled: bool = False) -> Any:
        plan = make_plan(f"--hidden-dropout 0.5 --max-position-embeddings 96 {flags}")
        state, examples = make_state(plan), [Continued("a", "b")] * len(REQUESTS)
        task = AskedTask(TASK, examples, REQUESTS, [1] * len(REQUESTS), 0)
        exits: Any = SimpleNamespace(signalled=signalled)
        return TaskEvaluator(state, [task], tokenizer, plan, runtime, exits), state

    return make


def test_scores_are_those_of_single_passes(scorer: Any) -> None:
    """They are the model's own probabilities; weights, mode and random numbers stay."""
    evaluator, state = scorer()
    state.model.train()
    head, before = state.model.head_loss, torch.get_rng_state()
    values = evaluator.evaluate().values["ends"]
    assert state.model.training
    assert state.model.head_loss is head
    assert torch.equal(torch.get_rng_state(), before)
    state.model.eval()
    logprobs, greedy = [], []
    with torch.no_grad():
        for request in REQUESTS:
            logits = state.model.logits(state.model(torch.tensor([request.inputs])))[0, :, :257]
            own = logits[len(request.context) - 1 :].double()
            targets = torch.tensor(request.targets)
            logprobs.append(-torch.nn.functional.cross_entropy(own, targets, reduction="sum"))
            greedy.append(bool((own.argmax(-1) == targets).all()))
    assert values["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / 4), rel=1e-5)
    assert values["acc"] == sum(greedy) / 4
    assert values["examples"] == 4


def test_shapes_of_passes(scorer: Any) -> None:
    """Sequences are padded to few lengths; a pass has as many tokens as one of training."""
    evaluator, _ = scorer("--micro-batch-size 8")
    assert evaluator._passes(REQUESTS) == [((1,), 96), ((2,), 96), ((0, 3), 48)]
    compiled, _ = scorer("--compile")
    assert compiled._lengths() == [16, 96]


def test_signal(scorer: Any) -> None:
    """A run that is to end gets no scores."""
    evaluator, state = scorer(signalled=True)
    assert evaluator.evaluate() is None
    assert state.model.training


def test_not_finite(scorer: Any) -> None:
    """Weights of NaN are an error that names the task."""
    evaluator, state = scorer()
    with torch.no_grad():
        state.model.final_norm.weight.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="task `ends`"):
        evaluator.evaluate()
    assert state.model.training
