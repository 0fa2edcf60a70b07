"""Requests that come, go and wait: each gets the text that it gets alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from lmcore.base.errors import RunError
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.cache import SlotCache
from lmcore.families.op_binding import OpBinding
from lmcore.generation import continuous_batch as module
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.generate import recompute
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.options import SamplingOptions

VOCABULARY = 257
POSITIONS = 32
GREEDY = SamplingOptions(greedy=True)
OPTIONS = [
    GREEDY,
    SamplingOptions(),
    SamplingOptions(temperature=0.7, top_k=9),
    SamplingOptions(top_p=0.8, top_p_decay=0.9, top_p_bound=0.2),
    SamplingOptions(min_p=0.1, repetition_penalty=1.3),
    SamplingOptions(frequency_penalty=0.5, presence_penalty=0.5, temperature=1.5),
]


@pytest.fixture
def ops() -> OpBinding:
    """The core's own ops: kernels have separate tests."""
    return OpBinding(OpTable(OP_SPECS), "cpu", "float32")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the tests need several chunks."""
    monkeypatch.setattr(module, "_PREFILL_TOKENS", 12)
    monkeypatch.setattr(module, "_SHARED_PREFILL_TOKENS", 5)
    monkeypatch.setattr(module, "_LOGIT_ROWS", 3)


@pytest.fixture
def model(model: GPT) -> GPT:
    """The model, in float64: rounding decides no token."""
    return model.double().eval()


def new_batch(model: GPT, **changes: int) -> ContinuousBatch:
    """Make an batch for few requests at a time."""
    return ContinuousBatch(model, vocab_size=VOCABULARY, **({"max_requests": 4} | changes))


def new_requests(count: int, seed: int = 0) -> list[Request]:
    """Return requests of all lengths and options."""
    source = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [source.randrange(VOCABULARY) for _ in range(source.randint(1, POSITIONS))]
        request = Request(
            prompt,
            source.randint(1, POSITIONS - len(prompt) + 1),
            OPTIONS[number % len(OPTIONS)],
            seed=number,
            stop_tokens=frozenset(source.sample(range(VOCABULARY), 20)),
            top_logprobs=number % 3 or None,
            prompt_logprobs=number % 4 == 0,
        )
        made.append(request)
    return made


def same(found: Continuation, expected: Continuation) -> None:
    """Compare two continuations of a request."""
    assert found.tokens == expected.tokens
    assert found.finish_reason == expected.finish_reason
    for own, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-5)


def finish(batch: ContinuousBatch) -> None:
    """Step until nothing is left."""
    while batch.num_running or batch.num_waiting:
        batch.step()
    assert batch.step() == []


@pytest.mark.parametrize("max_requests", [1, 3, 16])
def test_all_at_once(model: GPT, max_requests: int) -> None:
    """More requests than slots, of different lengths and options, equal recomputation."""
    asked = new_requests(20)
    batch = new_batch(model, max_requests=max_requests)
    made = [batch.add(one) for one in asked]
    finish(batch)
    for found, expected in zip(made, recompute(model, asked, VOCABULARY), strict=True):
        same(found, expected)
    assert len({one.finish_reason for one in made}) == 2


def test_joining_in_between(model: GPT) -> None:
    """Requests that come while others run change nothing."""
    asked = new_requests(12, seed=3)
    batch = new_batch(model)
    made = []
    for one in asked:
        made.append(batch.add(one))
        for _ in range(3):
            batch.step()
    finish(batch)
    for found, expected in zip(made, recompute(model, asked, VOCABULARY), strict=True):
        same(found, expected)


def test_probabilities_of_a_prompt(model: GPT) -> None:
    """Every token of a prompt but the first has the probability of a whole pass."""
    prompt = [7, 3, 200, 50, 50, 9, 1, 0, 33, 12, 99, 4, 61, 250]
    batch = new_batch(model)
    batch.add(Request([1, 2], 20, GREEDY))
    batch.step()
    made = [batch.add(Request(prompt, count, GREEDY, prompt_logprobs=True)) for count in (0, 1)]
    finish(batch)
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([prompt])))[0, :, :VOCABULARY]
    expected = logits.log_softmax(-1)[range(13), prompt[1:]].tolist()
    for one in made:
        assert [found.token for found in one.prompt_logprobs] == prompt[1:]
        assert [found.logprob for found in one.prompt_logprobs] == pytest.approx(expected, abs=1e-5)
    assert [len(one.tokens) for one in made] == [0, 1]


@pytest.mark.parametrize("when", [0, 1, 4])
def test_cancelled(model: GPT, when: int) -> None:
    """A cancelled request gets no further token, and its slot serves the next one."""
    asked = new_requests(8, seed=5)
    batch = new_batch(model, max_requests=2)
    made = [batch.add(one) for one in asked]
    for _ in range(when):
        batch.step()
    gone = [one for one in (made[0], made[1], made[5]) if not one.ended]
    before = [list(one.tokens) for one in gone]
    for one in gone:
        batch.cancel(one)
    finish(batch)
    assert [one.tokens for one in gone] == before
    assert {one.finish_reason for one in gone} == {"cancelled"}
    whole = recompute(model, asked, VOCABULARY)
    for found, expected in zip(made, whole, strict=True):
        if found not in gone:
            same(found, expected)


def break_for(model: GPT, token: int) -> Callable[[], None]:
    """Make the hidden states of a token NaN; return the function that restores the model."""

    def corrupt(_module: object, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((args[0] == token)[..., None], math.nan)

    return model.token_embedding.register_forward_hook(corrupt).remove


def test_numbers_that_are_not_finite_end_one_request(model: GPT) -> None:
    """The others continue, and the next request in the same slot works."""
    asked = [
        Request([5, 6], 9, GREEDY),
        Request([250, 9], 9, GREEDY),
        Request([8, 7, 6], 4, GREEDY),
        Request([1], 6, GREEDY),
    ]
    mend = break_for(model, 250)
    batch = new_batch(model, max_requests=2)
    made = [batch.add(one) for one in asked]
    finish(batch)
    mend()
    assert isinstance(made.pop(1).error, RunError)
    del asked[1]
    for found, expected in zip(made, recompute(model, asked, VOCABULARY), strict=True):
        same(found, expected)


def test_the_numbers_of_a_failed_request_do_not_stay(model: GPT) -> None:
    """A shorter request that moves into its slot has no part of them, nor has the next one."""
    asked = [Request([7] * 8, 9, GREEDY), Request([250] * 11, 9, GREEDY), Request([5], 9, GREEDY)]
    repair = break_for(model, 250)
    batch = new_batch(model, max_requests=3)
    made = [batch.add(one) for one in asked]
    finish(batch)
    repair()
    assert isinstance(made.pop(1).error, RunError)
    del asked[1]
    for found, expected in zip(made, recompute(model, asked, VOCABULARY), strict=True):
        same(found, expected)


def test_a_cancelled_prompt_leaves_no_numbers(model: GPT) -> None:
    """A request whose first chunk was not finite is cancelled before its first token."""
    repair = break_for(model, 250)
    batch = new_batch(model, max_requests=2)
    first = batch.add(Request([5, 6], 12, GREEDY))
    batch.step()
    broken = batch.add(Request([250] * 9, 2, GREEDY))
    batch.step()  # a chunk of 5
    batch.cancel(broken)
    last = batch.add(Request([8], 9, GREEDY))
    finish(batch)
    repair()
    asked = [first.request, last.request]
    for found, expected in zip([first, last], recompute(model, asked, VOCABULARY), strict=True):
        same(found, expected)


def test_the_oldest_prompt_is_taken_first(model: GPT) -> None:
    """A long prompt begins although shorter ones keep coming."""
    batch = new_batch(model, max_requests=3)
    batch.add(Request([1, 2], 30, GREEDY))
    batch.step()
    long = batch.add(Request([3] * 20, 2, GREEDY))
    for number in range(8):
        batch.add(Request([4, number], 1, GREEDY))
        batch.step()
    assert long.finish_reason == "length"


def test_prompts_of_about_a_length_are_taken_together(model: GPT) -> None:
    """The oldest one and its nearest in length, with little padding."""
    widths = []
    model.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape)))
    batch = new_batch(model)
    for length in (3, 1, 12, 4):
        batch.add(Request([1] * length, 1, GREEDY))
    finish(batch)
    assert widths == [(2, 4), (1, 1), (1, 12)]


@pytest.mark.parametrize("first", [True, False])
def test_a_request_without_memory_ends_alone(
    model: GPT, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that run and requests that fit get their texts; the next one is taken, too."""
    reserve = SlotCache.reserve

    def reserve_little(self: SlotCache, num_slots: int, capacity: int) -> None:
        if capacity > 20:
            layer = self._allocate(num_slots, capacity)
            for source, target in zip(self._layers[0], layer, strict=True):
                kept = (slice(self.num_slots), slice(None), slice(self.capacity))
                target[kept] = source[kept]
            self._layers[0] = layer
            raise RuntimeError("not enough memory: you tried to allocate 9 bytes")
        reserve(self, num_slots, capacity)

    monkeypatch.setattr(SlotCache, "reserve", reserve_little)
    asked = [Request([5], 9, GREEDY), Request([6], 25, GREEDY), Request([7, 8], 5, GREEDY)]
    if first:
        asked[:2] = asked[1::-1]
    batch = new_batch(model)
    made = [batch.add(one) for one in asked[:1]]
    batch.step()
    made += [batch.add(one) for one in asked[1:]]
    finish(batch)
    made.append(batch.add(asked[0 if not first else 1]))
    finish(batch)
    failed = made.pop(0 if first else 1)
    assert "not enough memory" in str(failed.error)
    requests = [one.request for one in made]
    for found, expected in zip(made, recompute(model, requests, VOCABULARY), strict=True):
        same(found, expected)


def test_a_prompt_that_fails_ends_alone(model: GPT) -> None:
    """The others get their texts."""

    def refuse(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == 250).any():
            raise RuntimeError("not enough memory")

    batch = new_batch(model)
    hook = model.register_forward_pre_hook(refuse)
    made = [batch.add(Request([5, 6], 9, GREEDY))]
    batch.step()
    made += [batch.add(Request([250], 9, GREEDY)), batch.add(Request([7] * 9, 3, GREEDY))]
    finish(batch)
    hook.remove()
    assert str(made.pop(1).error) == "not enough memory"
    requests = [one.request for one in made]
    for found, expected in zip(made, recompute(model, requests, VOCABULARY), strict=True):
        same(found, expected)


def test_the_cache_is_as_large_as_needed(model: GPT) -> None:
    """It grows while requests run, and is released when none is left."""
    batch = new_batch(model, max_requests=3)
    batch.add(Request([1, 2, 3], 4, GREEDY))
    batch.step()
    cache = batch._cache
    assert cache is not None
    assert (cache.num_slots, cache.capacity) == (1, 6)
    batch.add(Request([1] * 8, 2, GREEDY))
    batch.step()
    assert (cache.num_slots, cache.capacity) == (2, 12)
    finish(batch)
    batch.add(Request([1], 2, GREEDY))
    batch.step()
    assert (cache.num_slots, cache.capacity) == (1, 2)


def test_prompts_are_taken_in_chunks(model: GPT) -> None:
    """A long prompt does not hold up the tokens of others for longer than a chunk."""
    widths = []
    model.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape)))
    batch = new_batch(model)
    first = batch.add(Request([1, 2], 9, GREEDY))
    batch.step()
    batch.add(Request([3] * 13, 2, GREEDY))
    lengths = []
    for _ in range(3):
        batch.step()
        lengths.append(len(first.tokens))
    assert widths == [(1, 2), (1, 1), (1, 5), (2, 1), (1, 5), (2, 1), (1, 3)]
    assert lengths == [2, 3, 4]


def test_each_token_is_reported_before_the_next_is_computed(model: GPT) -> None:
    """A step adds one token to a request, the first one too: nobody waits for two passes."""
    batch = new_batch(model)
    made = [batch.add(Request([1, 2, 3], 3, GREEDY))]
    lengths = []
    for _ in range(4):
        batch.step()
        lengths.append([len(one.tokens) for one in made])
        if len(made) == 1:
            made.append(batch.add(Request([4, 5], 2, GREEDY)))
    assert lengths == [[1], [2, 1], [3, 2], [3, 2]]


class BrokenRule:
    """A constraint that fails, at once or after two tokens."""

    def __init__(self, method: str) -> None:
        self.method, self.tokens = method, 0

    def allowed(self, size: int) -> torch.Tensor:
        """Allow all."""
        if self.method == "allowed":
            raise ValueError("broken")
        return torch.ones(size, dtype=torch.bool)

    def accept(self, _token: int) -> bool:
        """Count the token."""
        self.tokens += 1
        if self.method == "accept" and self.tokens == 2:
            raise ValueError("broken")
        return False


def break_end(_tokens: object) -> bool:
    """Raise an error instead of deciding on the end of the text."""
    raise ValueError("broken")


@pytest.mark.parametrize("method", ["allowed", "accept", "ends"])
def test_a_rule_that_fails_ends_one_request(model: GPT, method: str) -> None:
    """The error is that request's; the others get their texts."""
    rule = BrokenRule(method) if method != "ends" else None
    ends = break_end if method == "ends" else None
    good = Request([5, 6], 6, GREEDY)
    bad = Request([7, 8], 6, GREEDY, constraint=rule, ends=ends)
    batch = new_batch(model, max_requests=2)
    broken, *made = [batch.add(one) for one in (bad, good, good)]
    finish(batch)
    assert str(broken.error) == "broken"
    (expected,) = recompute(model, [good], VOCABULARY)
    for found in made:
        same(found, expected)


def test_a_cancelled_request_waits_no_longer(model: GPT) -> None:
    """A queue that is bounded has its place free at once."""
    batch = new_batch(model, max_requests=1)
    made = [batch.add(Request([1], 5, GREEDY)) for _ in range(3)]
    batch.step()
    batch.cancel(made[1])
    assert batch.num_waiting == 1


def test_a_request_for_nothing(model: GPT) -> None:
    """No tokens need no pass."""
    batch = new_batch(model)
    assert batch.add(Request([1], 0)).finish_reason == "length"
    assert batch.step() == []
