"""The batch and beam search with a decoder that has an encoder: each text has its own source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lmcore.families.gpt.model import GPT
from lmcore.generation.beam import beam_search
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.text_model import SourceCache
from lmcore.model.shape import ModelShape

VOCABULARY = 23
SHAPE = ModelShape(1, 8, 1, 8, 64, VOCABULARY)


def hidden(source: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return the hidden state of the last token, which depends on the source and all tokens."""
    seed = sum((place + 1) * token for place, token in enumerate(tokens))
    seed += 1000 * sum((place + 1) * token for place, token in enumerate(source))
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


@dataclass
class View:
    """Slots of a pass, each with the number of tokens before it."""

    cache: Cache
    slots: list[tuple[int, int]]


class Cache:
    """Source and tokens of each slot."""

    def __init__(self) -> None:
        self.num_slots = self.capacity = 0
        self.sources: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}

    def reserve(self, num_slots: int, capacity: int) -> None:
        self.num_slots, self.capacity = num_slots, capacity

    def release(self) -> None:
        self.sources, self.texts = {}, {}

    def move(self, source: int, target: int, length: int) -> None:
        self.sources[target] = self.sources.pop(source)
        self.texts[target] = self.texts.pop(source)[:length]

    def clear(self, slot: int) -> None:
        self.sources.pop(slot, None)
        self.texts.pop(slot, None)

    def select(self, slots: Sequence[int], length: int) -> None:
        self.sources = {place: self.sources[slot] for place, slot in enumerate(slots)}
        self.texts = {place: self.texts[slot][:length] for place, slot in enumerate(slots)}

    def set_source(self, slot: int, tokens: Sequence[int]) -> None:
        self.sources[slot], self.texts[slot] = list(tokens), []

    def first_tokens(self, slots: Sequence[int], width: int) -> View:
        assert width > 0
        for slot in slots:
            self.texts[slot] = []
        return View(self, [(slot, 0) for slot in slots])

    def further_tokens(self, slot: int, start: int, width: int) -> View:
        assert width > 0
        return View(self, [(slot, start)])

    def next_tokens(self, lengths: Sequence[int]) -> View:
        return View(self, list(enumerate(lengths)))


class Decoder:
    """Decoder whose hidden states are logits."""

    causal, shape = True, SHAPE
    device, weight_dtype = torch.device("cpu"), torch.float32

    def __call__(self, tokens_BS: Tensor, cache: View) -> Tensor:
        rows = []
        for (slot, start), row in zip(cache.slots, tokens_BS.tolist(), strict=True):
            text = cache.cache.texts[slot] = cache.cache.texts[slot][:start] + row
            ends = range(start + 1, len(text) + 1)
            source = cache.cache.sources[slot]
            rows.append(torch.stack([hidden(source, text[:end]) for end in ends]))
        return torch.stack(rows)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return hidden_NH

    def new_cache(self, dtype: torch.dtype) -> Cache:
        assert dtype == torch.float32
        return Cache()


def greedy(source: Sequence[int], prompt: Sequence[int], count: int) -> list[int]:
    """Continue a prompt by the definition."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(hidden(source, text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("together", [1, 3])
def test_each_text_has_its_source(together: int) -> None:
    """Also when others end before it and it moves to another slot."""
    batch = ContinuousBatch(Decoder(), vocab_size=VOCABULARY, max_requests=together)
    cases = [
        ([number, 2, 9 - number], [0, *range(number % 3)], 3 + 2 * number) for number in range(6)
    ]
    made = [
        batch.add(Request(prompt, count, SamplingOptions(greedy=True), source=source))
        for source, prompt, count in cases
    ]
    batch.run()
    for one, (source, prompt, count) in zip(made, cases, strict=True):
        assert one.tokens == greedy(source, prompt, count)


def test_beams_share_a_source() -> None:
    """A beam of width 1 is the greedy text; wider ones are at least as probable."""
    scores = []
    for width in (1, 4):
        best, *_ = beam_search(
            Decoder(), [0], width=width, max_tokens=5, vocab_size=VOCABULARY, source=[7, 1]
        )
        scores.append(best.score)
        if width == 1:
            assert list(best.tokens) == greedy([7, 1], [0], 5)
    assert scores[1] >= scores[0]


def test_a_model_without_an_encoder(model: GPT) -> None:
    """A source is refused: it would be ignored."""
    assert isinstance(Cache(), SourceCache)
    assert not isinstance(model.new_cache(torch.float32), SourceCache)
    batch = ContinuousBatch(model.eval(), vocab_size=257)
    batch.add(Request([1], 2, source=[5]))
    with pytest.raises(TypeError, match="the model has no encoder"):
        batch.run()
