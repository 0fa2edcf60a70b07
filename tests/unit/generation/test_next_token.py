"""The next token of several continuations: what is chosen, noted and ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.base.errors import RunError
from lmcore.generation.next_token import extend, probabilities
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.logits import new_generator
from lmcore.generation.sampling.options import SamplingOptions

GREEDY = SamplingOptions(greedy=True)


def continuation(**changes: Any) -> Continuation:
    """Make a greedy continuation of one token."""
    request = Request(**({"prompt": [0], "max_tokens": 9, "options": GREEDY} | changes))
    return Continuation(request, new_generator(request.seed))


def ends_with(*tokens: int) -> Callable[[Sequence[int]], bool]:
    """Make a rule that ends the text after *tokens*."""
    return lambda made: tuple(made[-len(tokens) :]) == tokens


class Only:
    """A constraint with one possible text."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)

    def allowed(self, size: int) -> Tensor:
        mask = torch.zeros(size, dtype=torch.bool)
        mask[self.left[0]] = True
        return mask

    def accept(self, token: int) -> bool:
        assert token == self.left.pop(0)
        return not self.left


@pytest.mark.parametrize(
    "options", [SamplingOptions(temperature=100.0), GREEDY, SamplingOptions(top_k=40)]
)
def test_padding_is_never_chosen(options: SamplingOptions) -> None:
    """Ids from the true size on do not come, whatever their logits are."""
    made = [continuation(options=options, seed=seed) for seed in range(500)]
    logits = torch.zeros(500, 16)
    logits[:, 10:13] = 50.0
    logits[:, 13:] = math.nan
    assert max(extend(made, logits, 10)) < 10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [SamplingOptions(), GREEDY])
def test_logits_that_are_not_finite(bad: float, options: SamplingOptions) -> None:
    """One continuation ends with an error; the others continue."""
    made = [continuation(options=options, seed=seed, top_logprobs=2) for seed in range(3)]
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    extend(made, logits, 8)
    assert [one.ended for one in made] == [False, True, False]
    assert [len(one.tokens) for one in made] == [1, 0, 1]
    assert isinstance(made[1].error, RunError)


def test_no_possible_token() -> None:
    """Logits of minus infinity alone are an error, too."""
    made = continuation()
    extend([made], torch.full((1, 4), -math.inf), 4)
    assert "not finite" in str(made.error)


def test_probabilities_are_the_models() -> None:
    """They are those before temperature and penalties, of the true vocabulary."""
    options = SamplingOptions(temperature=0.1, top_k=1, repetition_penalty=5.0)
    made = continuation(options=options, prompt=[1], top_logprobs=2)
    extend([made], torch.tensor([[1.0, 2.0, 0.5, 9.0]]), 3)
    total = sum(math.exp(logit) for logit in (1.0, 2.0, 0.5))
    (one,) = made.logprobs
    assert one.token == made.tokens[0] == 0, "the penalty makes 1 less probable"
    assert one.logprob == pytest.approx(1.0 - math.log(total))
    assert [token for token, _ in one.top] == [1, 0]
    assert one.top[0][1] == pytest.approx(2.0 - math.log(total))


def test_more_probabilities_than_tokens() -> None:
    """All tokens are named if more are wanted."""
    (one,) = probabilities(torch.zeros(1, 3), [2], 20)
    assert len(one.top) == 3


def test_each_continuation_gets_as_many_probabilities_as_it_wants() -> None:
    """None, the chosen one alone, or more."""
    made = [continuation(top_logprobs=count) for count in (None, 0, 3)]
    extend(made, torch.zeros(3, 8), 8)
    assert [[len(one.top) for one in text.logprobs] for text in made] == [[], [0], [3]]


def test_the_end() -> None:
    """A stop token is left out, a rule keeps its last token, a length is exact."""
    logits = torch.tensor([[0.0, 0.0, 1.0]])
    stopped = continuation(stop_tokens=frozenset({2}), top_logprobs=0)
    ruled = continuation(ends=ends_with(2, 2), top_logprobs=0)
    short = continuation(max_tokens=3, top_logprobs=0)
    for one in (stopped, ruled, short):
        while not one.ended:
            extend([one], logits, 3)
    assert (stopped.tokens, stopped.finish_reason) == ([], "stop")
    assert (ruled.tokens, ruled.finish_reason) == ([2, 2], "stop")
    assert (short.tokens, short.finish_reason) == ([2, 2, 2], "length")
    assert [len(one.logprobs) for one in (stopped, ruled, short)] == [0, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constraint(dtype: torch.dtype) -> None:
    """Only allowed tokens are chosen, and the text ends when it is complete."""
    made = [continuation(constraint=Only(3, 1)), continuation()]
    logits = torch.tensor([[0.0, 1.0, 9.0, -5.0], [0.0, 1.0, 9.0, -5.0]], dtype=dtype)
    for _ in range(2):
        extend(made, logits, 4)
    assert (made[0].tokens, made[0].finish_reason) == ([3, 1], "stop")
    assert made[1].tokens == [2, 2]
