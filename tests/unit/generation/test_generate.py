"""Generation against recomputation, against a loop written by hand, and in its corners."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from lmcore.base.errors import ConfigError, RunError
from lmcore.families.gpt.model import GPT
from lmcore.generation.generate import (
    Generation,
    generate,
    generate_with_cache,
    recompute,
    require_room,
    room,
)
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.text_model import Execution

GREEDY = SamplingOptions(greedy=True)
PROMPTS = [[5, 99, 17], [200, 3, 44, 8, 8, 61, 250], [7], [1, 2, 3]]
VOCABULARY = 257


def run(model: GPT, prompts: Sequence[Sequence[int]], **changes) -> list[Generation]:
    """Generate with the tests' usual arguments."""
    arguments = {
        "num_tokens": 12,
        "options": GREEDY,
        "seed": 0,
        "eod": None,
        "vocab_size": VOCABULARY,
    }
    return generate(model, prompts, **(arguments | changes))


def tokens(made: Sequence[Generation]) -> list[tuple[int, ...]]:
    """Return the tokens alone."""
    return [one.tokens for one in made]


def by_hand(model: GPT, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Compute the greedy continuation by whole passes and Python's own maximum."""
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([ids])))[0, -1, :VOCABULARY].tolist()
        ids.append(max(range(VOCABULARY), key=logits.__getitem__))
    return tuple(ids[len(prompt) :])


class TestEquality:
    """The cache and the batch change nothing."""

    def test_equals_the_loop_by_hand(self, model: GPT) -> None:
        """Greedy text is the argmax of whole passes, for prompts of all lengths in one batch."""
        model.eval()
        expected = [by_hand(model, prompt, 12) for prompt in PROMPTS]
        assert tokens(run(model, PROMPTS)) == expected
        assert len({token for row in expected for token in row}) > 10

    @pytest.mark.parametrize(
        "options",
        [
            GREEDY,
            SamplingOptions(),
            SamplingOptions(temperature=0.7, top_k=9),
            SamplingOptions(top_p=0.8),
        ],
    )
    def test_cache_equals_recomputation(self, model: GPT, options: SamplingOptions) -> None:
        """With and without the cache the tokens are the same, drawn ones as well."""
        cached = run(model, PROMPTS, options=options)
        assert cached == run(model, PROMPTS, options=options, use_cache=False)

    def test_probabilities_with_and_without_cache(self, model: GPT) -> None:
        """The log-probabilities at every step agree to 1e-5."""
        model.eval()
        requests = [Request(prompt, 12, GREEDY, top_logprobs=5) for prompt in PROMPTS]
        cached, whole = (
            [one for text in make(model, requests, VOCABULARY) for one in text.logprobs]
            for make in (generate_with_cache, recompute)
        )
        assert len(cached) == len(whole) == 48
        for found, expected in zip(cached, whole, strict=True):
            assert found.token == expected.token == expected.top[0][0]
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
            values = [dict(one.top).values() for one in (found, expected)]
            assert list(values[0]) == pytest.approx(list(values[1]), abs=1e-5)

    def test_row_alone(self, model: GPT) -> None:
        """Row i of a batch is what its prompt gives alone with the seed of row i."""
        options = SamplingOptions(temperature=1.3)
        together = run(model, PROMPTS, options=options, seed=40)
        for row, prompt in enumerate(PROMPTS):
            assert run(model, [prompt], options=options, seed=40 + row) == [together[row]]

    def test_seed_decides(self, model: GPT) -> None:
        """A seed gives the same text, another seed another text."""
        options = SamplingOptions()
        first = run(model, PROMPTS, options=options)
        assert run(model, PROMPTS, options=options) == first
        assert run(model, PROMPTS, options=options, seed=100) != first

    def test_double_precision(self, model: GPT) -> None:
        """A model of another dtype gets a cache of its dtype."""
        model.double()
        assert run(model, PROMPTS) == run(model, PROMPTS, use_cache=False)


class TestEnd:
    """A document ends at its eod, a row at its tokens."""

    def test_stops_at_eod(self, model: GPT) -> None:
        """A row ends before the first eod, which is not part of it; the others continue."""
        free = tokens(run(model, PROMPTS))
        eod = free[1][4]
        made = run(model, PROMPTS, eod=eod)
        for row, (whole, one) in enumerate(zip(free, made, strict=True)):
            cut = whole.index(eod) if eod in whole else len(whole)
            assert one == Generation(whole[:cut], finished=eod in whole), row
        assert made[1].finished
        assert len(made[1].tokens) <= 4

    def test_all_rows_ended(self, model: GPT) -> None:
        """No further pass runs after every row has ended."""
        eod = tokens(run(model, PROMPTS[:1]))[0][2]
        passes = []
        model.register_forward_hook(lambda *_: passes.append(1))
        (made,) = run(model, PROMPTS[:1], eod=eod, num_tokens=20)
        assert made.finished
        assert len(passes) == len(made.tokens) + 1

    def test_eod_in_a_prompt(self, model: GPT) -> None:
        """An eod that was given ends nothing."""
        (made,) = run(model, [[4, 9, 9, 7]], eod=9, num_tokens=1)
        assert made.tokens == by_hand(model.eval(), [4, 9, 9, 7], 1) or made.finished

    @pytest.mark.parametrize("num_tokens", [0, 1])
    def test_few_tokens(self, model: GPT, num_tokens: int) -> None:
        """Each row gets exactly the tokens asked for, none included."""
        assert [len(row) for row in tokens(run(model, PROMPTS, num_tokens=num_tokens))] == [
            num_tokens
        ] * 4

    def test_no_prompts(self, model: GPT) -> None:
        """No prompts give no text."""
        assert run(model, []) == []


class TestPasses:
    """Nothing is computed that is not needed."""

    def test_one_token_a_pass(self, model: GPT) -> None:
        """After the prompt each pass takes one token, and the head one position."""
        widths, heads = [], []
        model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
        logits = model.logits
        model.logits = lambda hidden: heads.append(hidden.shape) or logits(hidden)
        run(model, [PROMPTS[1]] * 2, num_tokens=5)
        assert widths == [7, 1, 1, 1, 1]
        assert heads == [(2, 24)] * 5

    def test_cache_is_exactly_filled(self, model: GPT) -> None:
        """The cache has positions for the tokens that are fed, and no more."""
        made = []
        new_cache = model.new_cache
        model.new_cache = lambda *args: made.append(new_cache(*args)) or made[-1]
        run(model, PROMPTS, num_tokens=5)
        assert [(cache.num_slots, cache.capacity) for cache in made] == [(4, 11)]


class TestSurroundings:
    """The model is left as it was, and the context is used as it should."""

    @pytest.mark.parametrize("training", [True, False])
    def test_mode_returns(self, model: GPT, training: bool) -> None:
        """The model evaluates meanwhile, and afterwards is in the mode that it was in."""
        model.train(training)
        modes = []
        run(model, PROMPTS, on_token=lambda *_: modes.append(model.training))
        assert set(modes) == {False}
        assert model.training is training

    def test_mode_returns_after_a_failure(self, model: GPT) -> None:
        """A failure on the way leaves the mode as it was."""

        def fail(row: int, token: int) -> None:
            raise KeyboardInterrupt

        model.train()
        with pytest.raises(KeyboardInterrupt):
            run(model, PROMPTS, on_token=fail)
        assert model.training
        assert not torch.is_inference_mode_enabled()

    def test_dropout_is_off(self, model: GPT) -> None:
        """A model in training gives the text of one that is not."""
        expected = run(model.eval(), PROMPTS)
        for module in model.modules():
            if hasattr(module, "dropout"):
                module.dropout = 0.5
        assert run(model.train(), PROMPTS) == expected

    def test_no_gradients(self, model: GPT) -> None:
        """Nothing is recorded for a backward pass."""
        modes = []
        run(model, PROMPTS, on_token=lambda *_: modes.append(torch.is_inference_mode_enabled()))
        assert set(modes) == {True}

    def test_precision_context(self, model: GPT) -> None:
        """One context holds for all passes, and the cache has the dtype of its products."""
        entered = []

        @contextlib.contextmanager
        def half() -> Iterator[None]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                entered.append(True)
                yield

        dtypes = []
        new_cache = model.new_cache
        model.new_cache = lambda *args: dtypes.append(args[-1]) or new_cache(*args)
        made = run(model, PROMPTS, execution=Execution(half))
        assert entered == [True]
        assert dtypes == [torch.bfloat16]
        assert {len(one.tokens) for one in made} == {12}

    def test_tokens_as_they_come(self, model: GPT) -> None:
        """`on_token` gets every token of the result, each row in order, and no eod."""
        free = tokens(run(model, PROMPTS))
        reported: list[list[int]] = [[] for _ in PROMPTS]
        made = run(
            model,
            PROMPTS,
            eod=free[0][5],
            on_token=lambda row, token: reported[row].append(token),
        )
        assert [tuple(row) for row in reported] == tokens(made)


class TestBadInput:
    """Impossible requests are refused before anything is computed."""

    def test_room(self) -> None:
        """The last token needs no position, so a full prompt leaves room for one."""
        assert [room(32, length) for length in (0, 1, 31, 32, 33, 99)] == [32, 32, 2, 1, 0, 0]

    def test_up_to_the_last_position(self, model: GPT) -> None:
        """All positions can be used, and the tokens equal recomputation's."""
        prompt = list(range(20))
        made = run(model, [prompt], num_tokens=13)
        assert len(made[0].tokens) == 13
        assert made == run(model, [prompt], num_tokens=13, use_cache=False)

    def test_no_room(self, model: GPT) -> None:
        """One token more is refused with the number that fits."""
        with pytest.raises(ConfigError, match="prompt 2 of 20 tokens leaves no room") as caught:
            run(model, [[1], list(range(20))], num_tokens=14)
        assert "--tokens 13" in str(caught.value.hint)

    def test_prompt_too_long(self) -> None:
        """A prompt longer than the positions is refused for any number of tokens."""
        with pytest.raises(ConfigError, match="has 33 tokens, too many"):
            require_room([[0] * 33], 1, 32)

    def test_empty_prompt(self, model: GPT) -> None:
        """An empty prompt starts from eod, as a document does."""
        assert run(model, [[]], eod=256) == run(model, [[256]], eod=256)
        with pytest.raises(ConfigError, match="prompt 2 is empty"):
            run(model, [[1], []], eod=None)

    @pytest.mark.parametrize("token", [-1, 257, 383])
    def test_unknown_id(self, model: GPT, token: int) -> None:
        """An id outside the true vocabulary is refused, in the padding as well."""
        with pytest.raises(ConfigError, match=f"token id {token}"):
            run(model, [[1, token]])

    def test_broken_weights(self, model: GPT) -> None:
        """Weights that are not numbers stop with a reason."""
        with torch.no_grad():
            model.final_norm.weight[0] = float("nan")
        with pytest.raises(RunError, match="not finite"):
            run(model, PROMPTS)
