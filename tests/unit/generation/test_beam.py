"""Beam search against a search written by hand, and against all texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from lmcore.base.errors import RunError
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.generation.beam import Beam, BeamSearch, beam_search

VOCABULARY = 257


@pytest.fixture
def ops() -> OpBinding:
    """The core's own ops: kernels have separate tests."""
    return OpBinding(OpTable(OP_SPECS), "cpu", "float32")


@pytest.fixture
def model(model: GPT) -> GPT:
    """The model, in float64: rounding decides nothing."""
    return model.double().eval()


def logprobs(model: GPT, ids: Sequence[int], size: int = VOCABULARY) -> list[float]:
    """Compute the log-probabilities after *ids*, by a whole pass."""
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([list(ids)])))[0, -1, :size]
    return logits.log_softmax(-1).tolist()


def by_hand(
    model: GPT, prompt: list[int], width: int, num: int, stop: set[int], penalty: float
) -> list[tuple[tuple[int, ...], bool, float]]:
    """Beam search with whole passes and Python's sort, without an early end."""
    beams, found = [((), 0.0)], []
    for _ in range(num):
        candidates = [
            ((*tokens, token), total + value)
            for tokens, total in beams
            for token, value in enumerate(logprobs(model, [*prompt, *tokens]))
        ]
        candidates.sort(key=lambda one: -one[1])
        beams = []
        for rank, (tokens, total) in enumerate(candidates):
            if tokens[-1] in stop:
                if rank < width:
                    found.append((tokens[:-1], True, total / len(tokens) ** penalty))
            elif len(beams) < width:
                beams.append((tokens, total))
    found = sorted(found, key=lambda one: -one[2])[:width]
    found += [(tokens, False, total / len(tokens) ** penalty) for tokens, total in beams]
    return sorted(found, key=lambda one: -one[2])[:width]


def same(found: Sequence[Beam], expected: list[tuple[tuple[int, ...], bool, float]]) -> None:
    """Compare texts and scores."""
    assert [(one.tokens, one.finished) for one in found] == [one[:2] for one in expected]
    assert [one.score for one in found] == pytest.approx([one[2] for one in expected], abs=1e-5)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_equals_the_search_by_hand(model: GPT, width: int) -> None:
    """Texts and scores without a stop token."""
    found = beam_search(model, [5, 99, 17], width=width, max_tokens=5, vocab_size=VOCABULARY)
    same(found, by_hand(model, [5, 99, 17], width, 5, set(), 1.0))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_stop_tokens(model: GPT, penalty: float) -> None:
    """Ended texts compete with longer ones, and none is lost by ending early."""
    free = beam_search(model, [5], width=3, max_tokens=6, vocab_size=VOCABULARY)
    stop = {token for one in free for token in one.tokens[2:]}
    found = beam_search(
        model,
        [5],
        width=3,
        max_tokens=6,
        vocab_size=VOCABULARY,
        stop_tokens=frozenset(stop),
        length_penalty=penalty,
    )
    expected = by_hand(model, [5], 3, 6, stop, penalty)
    assert any(one.finished for one in found)
    if penalty <= 1.0:  # an early end is exact: later tokens cannot raise the score of a text
        same(found[:1], expected[:1])
    for one in found:
        assert one.score == pytest.approx(
            sum(one.logprobs) / len(one.logprobs) ** penalty, abs=1e-5
        )


def test_many_stop_tokens(model: GPT) -> None:
    """Likelier stop tokens do not lower the number of texts that a search continues."""
    values = logprobs(model, [5])
    order = sorted(range(VOCABULARY), key=lambda token: -values[token])
    stop = frozenset(order[1:9])
    search = BeamSearch(model, [5], width=3, max_tokens=4, vocab_size=VOCABULARY, stop_tokens=stop)
    search.step()
    assert [one.tokens for one in search._beams] == [(order[at],) for at in (0, 9, 10)]


def test_a_wide_search_finds_the_best_of_all_texts(model: GPT) -> None:
    """A search as wide as the number of texts is exact."""
    size, num = 4, 3
    totals = {}
    for text in itertools.product(range(size), repeat=num):
        parts = [logprobs(model, [2, *text[:at]], size)[text[at]] for at in range(num)]
        totals[text] = sum(parts) / num
    best = sorted(totals, key=lambda text: -totals[text])
    found = beam_search(model, [2], width=size**num, max_tokens=num, vocab_size=size)
    assert [one.tokens for one in found] == best


def test_a_width_of_one_is_greedy(model: GPT) -> None:
    """One beam follows the most probable token."""
    (found,) = beam_search(model, [7, 8], width=1, max_tokens=6, vocab_size=VOCABULARY)
    ids = [7, 8]
    for _ in range(6):
        values = logprobs(model, ids)
        ids.append(max(range(VOCABULARY), key=values.__getitem__))
    assert found.tokens == tuple(ids[2:])


def test_all_candidates_end(model: GPT) -> None:
    """The search ends if every token is a stop token."""
    found = beam_search(
        model, [1], width=2, max_tokens=5, vocab_size=3, stop_tokens=frozenset({0, 1, 2})
    )
    assert [one.tokens for one in found] == [(), ()]
    assert all(one.finished for one in found)


def test_numbers_that_are_not_finite(model: GPT) -> None:
    """NaN is an error."""
    with torch.no_grad():
        model.final_norm.weight[0] = math.nan
    with pytest.raises(RunError, match="not finite"):
        beam_search(model, [1], width=2, max_tokens=2, vocab_size=VOCABULARY)
