"""Generation over the cache, beside passes over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmcore.families.t5.model import T5Model
from lmcore.generation.beam import beam_search
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.generate import generate_with_cache
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions

from .conftest import KINDS

GREEDY = SamplingOptions(greedy=True)
SOURCES = ([5, 9, 30, 2, 8, 1], [7, 1], [29, 4, 4, 17, 3, 3, 8, 21, 1], [11, 12, 13, 1])


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, make_t5: Callable[..., T5Model]) -> T5Model:
    return make_t5(masked=True, **KINDS[request.param]).eval()


@torch.no_grad()
def whole(model: T5Model, source: list[int], prompt: list[int], count: int) -> list[int]:
    """Return the most probable tokens, each by a pass over all tokens before."""
    memory = model.memory(torch.tensor([source]))
    tokens = list(prompt)
    for _ in range(count):
        hidden = model.hidden(torch.tensor([tokens]), memory)
        tokens.append(int(model.logits(hidden)[0, -1].argmax()))
    return tokens[len(prompt) :]


def requests(prompts: Any, count: int) -> list[Request]:
    pairs = zip(SOURCES, prompts, strict=True)
    return [Request(prompt, count, GREEDY, source=source) for source, prompt in pairs]


def test_requests_together(model: T5Model) -> None:
    """Sources and beginnings of several lengths, together, have the tokens of each alone."""
    prompts = ([0], [0, 5, 6], [0, 9], [0])
    found = generate_with_cache(model, requests(prompts, 7), vocab_size=32)
    wanted = [whole(model, *pair, 7) for pair in zip(SOURCES, prompts, strict=True)]
    assert [one.tokens for one in found] == wanted
    assert len({tuple(one) for one in wanted}) > 1


def test_slots_are_used_again(model: T5Model) -> None:
    """With two slots for four requests that end apart, each keeps its own source."""
    batch = ContinuousBatch(model, vocab_size=32, max_requests=2)
    counts = (2, 6, 5, 4)
    made = [
        batch.add(Request([0], count, GREEDY, source=source))
        for source, count in zip(SOURCES, counts, strict=True)
    ]
    batch.run()
    for one, source, count in zip(made, SOURCES, counts, strict=True):
        assert one.error is None
        assert one.tokens == whole(model, source, [0], count)


def test_a_long_beginning_in_parts(model: T5Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that is taken in several passes has the same tokens."""
    monkeypatch.setattr("lmcore.generation.continuous_batch._PREFILL_TOKENS", 3)
    prompt = [0, 5, 9, 3, 14, 15, 2]
    request = Request(prompt, 4, GREEDY, source=SOURCES[0])
    (found,) = generate_with_cache(model, [request], vocab_size=32)
    assert found.tokens == whole(model, SOURCES[0], prompt, 4)


def test_beam_search(model: T5Model) -> None:
    """One beam is greedy; of several the best is at least as probable."""
    (one,) = beam_search(model, [0], width=1, max_tokens=5, vocab_size=32, source=SOURCES[2])
    assert list(one.tokens) == whole(model, SOURCES[2], [0], 5)
    several = beam_search(model, [0], width=4, max_tokens=5, vocab_size=32, source=SOURCES[2])
    assert several[0].score >= one.score - 1e-5
