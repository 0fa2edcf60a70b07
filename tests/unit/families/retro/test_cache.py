"""Generation over the cache, beside passes over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from lmcore.families.retro.model import Retro
from lmcore.generation.beam import beam_search
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.generate import generate_with_cache
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions

from .conftest import CHUNK, KINDS, NEIGHBORS, RETRIEVED

GREEDY = SamplingOptions(greedy=True)
PROMPTS = ([5], [7, 1, 30], [29, 4, 4, 17, 3, 3, 8, 21, 1], [11, 12, 13, 1, 2])
COUNTS = (15, 12, 9, 13)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, make_retro: Callable[..., Retro]) -> Retro:
    return make_retro(masked=True, **KINDS[request.param]).eval()


def source_of(number: int) -> list[int]:
    """Return neighbours of some chunks; the last request has none."""
    chunks = (4, 3, 5, 0)[number]
    drawn = torch.Generator().manual_seed(number)
    found = torch.randint(0, 32, (chunks, NEIGHBORS, RETRIEVED), generator=drawn)
    found[1:, 1, 6:] = -1
    return found.flatten().tolist()


@torch.no_grad()
def whole(model: Retro, source: Sequence[int], prompt: list[int], count: int) -> list[int]:
    """Return the most probable tokens, each by a pass over all chunks so far."""
    tokens = list(prompt)
    chunks = -(-(len(prompt) + count) // CHUNK)
    neighbors = torch.full((chunks, NEIGHBORS, RETRIEVED), -1)
    given = torch.tensor(source, dtype=torch.int64).view(-1, NEIGHBORS, RETRIEVED)[:chunks]
    neighbors[: len(given)] = given
    for _ in range(count):
        length = -(-len(tokens) // CHUNK) * CHUNK
        padded = torch.tensor([tokens + [0] * (length - len(tokens))])
        some = neighbors[None, : length // CHUNK]
        hidden = model(padded, neighbors_BLKR=some.clamp(min=0), neighbor_padding_BLKR=some < 0)
        tokens.append(int(model.logits(hidden)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def wanted(model: Retro) -> list[list[int]]:
    rows = zip(range(4), PROMPTS, COUNTS, strict=True)
    return [whole(model, source_of(number), prompt, count) for number, prompt, count in rows]


def requests() -> list[Request]:
    rows = zip(range(4), PROMPTS, COUNTS, strict=True)
    return [
        Request(prompt, count, GREEDY, source=source_of(number)) for number, prompt, count in rows
    ]


def test_requests_together(model: Retro) -> None:
    """Texts of several lengths, with neighbours and without, have the tokens of each alone."""
    found = generate_with_cache(model, requests(), vocab_size=32)
    assert [one.tokens for one in found] == wanted(model)
    other = Request(PROMPTS[2], COUNTS[2], GREEDY, source=source_of(1))
    (changed,) = generate_with_cache(model, [other], vocab_size=32)
    assert changed.tokens != found[2].tokens, "neighbours count"


def test_slots_are_used_again(model: Retro) -> None:
    """With two slots for four requests that end apart, each keeps its own neighbours."""
    batch = ContinuousBatch(model, vocab_size=32, max_requests=2)
    made = [batch.add(request) for request in requests()]
    batch.run()
    assert [one.error for one in made] == [None] * 4
    assert [one.tokens for one in made] == wanted(model)


def test_a_long_beginning_in_parts(model: Retro, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are taken in several passes, beside texts that grow, have the same tokens."""
    monkeypatch.setattr("lmcore.generation.continuous_batch._PREFILL_TOKENS", 3)
    monkeypatch.setattr("lmcore.generation.continuous_batch._SHARED_PREFILL_TOKENS", 2)
    found = generate_with_cache(model, requests(), vocab_size=32)
    assert [one.tokens for one in found] == wanted(model)


def test_beam_search(model: Retro) -> None:
    """One beam is greedy; a score of several is as of a pass over the whole text."""
    prompt, source = PROMPTS[1], source_of(1)
    (one,) = beam_search(model, prompt, width=1, max_tokens=9, vocab_size=32, source=source)
    assert list(one.tokens) == whole(model, source, prompt, 9)
    several = beam_search(
        model, prompt, width=4, max_tokens=9, vocab_size=32, source=source, length_penalty=0.0
    )
    tokens = [*prompt, *several[0].tokens]
    length = -(-len(tokens) // CHUNK) * CHUNK
    padded = torch.tensor([tokens + [0] * (length - len(tokens))])
    neighbors = torch.tensor(source).view(1, -1, NEIGHBORS, RETRIEVED)[:, : length // CHUNK]
    with torch.no_grad():
        hidden = model(
            padded, neighbors_BLKR=neighbors.clamp(min=0), neighbor_padding_BLKR=neighbors < 0
        )
        places = torch.arange(len(prompt), len(tokens))
        logprobs = model.logits(hidden)[0].log_softmax(-1)[places - 1, torch.tensor(tokens)[places]]
    assert several[0].score == pytest.approx(float(logprobs.sum()), rel=1e-4)


def test_encoding_once(model: Retro, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder runs once for each complete chunk while a text grows."""
    encoded: list[int] = []
    encode = model.encode
    monkeypatch.setattr(
        model, "encode", lambda *given: encoded.append(len(given[0])) or encode(*given)
    )
    (found,) = generate_with_cache(model, requests()[:1], vocab_size=32)
    assert encoded == [1, 1, 1], "after tokens 3, 7 and 11"
    assert found.tokens == whole(model, source_of(0), list(PROMPTS[0]), COUNTS[0])
