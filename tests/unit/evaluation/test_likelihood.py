"""Log-likelihoods: as of one sequence alone, whatever is computed together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from lmcore.base.errors import RunError
from lmcore.evaluation import likelihood
from lmcore.evaluation.likelihood import Likelihoods, Scored
from lmcore.evaluation.score import LogLikelihood
from lmcore.inference.load import LoadedModel

VOCABULARY = 257


def asked(count: int = 40, seed: int = 0) -> list[Scored]:
    """Return requests of all lengths; many have one of a few contexts."""
    source = random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(source.randrange(VOCABULARY) for _ in range(source.randint(least, most)))

    contexts = [some(1, 20) for _ in range(6)]
    return [
        Scored(source.choice(contexts) if source.random() < 0.7 else some(1, 20), some(1, 12))
        for _ in range(count)
    ]


def alone(loaded: LoadedModel, request: Scored) -> LogLikelihood:
    """Return the log-likelihood by one plain pass over the whole sequence."""
    tokens = torch.tensor([[*request.context, *request.targets]])
    model = loaded.model
    with torch.no_grad():
        logits = model.logits(model(tokens)[0])[:, :VOCABULARY]
    logprobs = logits.log_softmax(dim=-1)
    first = len(request.context)
    places = range(first, tokens.shape[1])
    own = [logprobs[place - 1, tokens[0, place]].item() for place in places]
    best = [logprobs[place - 1].argmax() == tokens[0, place] for place in places]
    return LogLikelihood(sum(own), all(best), len(own))


def close(found: Sequence[LogLikelihood], expected: Sequence[LogLikelihood]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        # the logits are summed in float32
        assert one.logprob == pytest.approx(other.logprob, rel=1e-5)
        assert (one.greedy, one.tokens) == (other.greedy, other.tokens)


@pytest.mark.parametrize("block", [1, 30, 100, 512])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_one_alone(
    loaded: Callable[[str], LoadedModel],
    positions: str,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding, other sequences, shared contexts and the size of a pass change nothing."""
    monkeypatch.setattr(likelihood, "BLOCK", block)
    model, requests = loaded(positions), asked()
    found = Likelihoods(model).of(requests)
    close(found, [alone(model, one) for one in requests])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_results_are_the_same_bits(loaded: Callable[[str], LoadedModel], positions: str) -> None:
    """The size of a batch, the order, and what else is asked for change no bit, in float32."""
    model, requests = loaded(positions), asked(120)
    model.model.float()
    found = Likelihoods(model).of(requests)
    for tokens in (1, 3000, 100_000):
        assert Likelihoods(model, tokens=tokens).of(requests) == found
    order = list(range(len(requests)))
    random.Random(3).shuffle(order)
    other = Likelihoods(model).of([requests[number] for number in order])
    assert other == [found[number] for number in order]
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(requests):
        by_context.setdefault(one.context, []).append(number)
    assert {len(one) > 1 for one in by_context.values()} == {True, False}
    for numbers in list(by_context.values())[::3]:
        alone = Likelihoods(model).of([requests[number] for number in numbers])
        assert alone == [found[number] for number in numbers]


def test_a_stop_changes_no_bit(loaded: Callable[..., LoadedModel]) -> None:
    """Some answers to a context are known: the others are computed after it all the same."""
    model, requests = loaded(), asked()
    model.model.float()
    found = Likelihoods(model).of(requests)
    known = {number: found[number] for number in range(0, 40, 3)}
    assert Likelihoods(model).of(requests, known=known) == found


def test_the_most_probable_token(loaded: Callable[..., LoadedModel]) -> None:
    """A continuation is greedy if the model would have written it, token by token."""
    model, context = loaded(), (5, 6, 7)
    written = list(context)
    for _ in range(4):
        with torch.no_grad():
            hidden = model.model(torch.tensor([written]))[0, -1:]
            logits = model.model.logits(hidden)[0, :VOCABULARY]
        written.append(int(logits.argmax()))
    right = Scored(context, tuple(written[3:]))
    wrong = Scored(context, (*right.targets[:-1], (right.targets[-1] + 1) % VOCABULARY))
    found = Likelihoods(model).of([right, wrong])
    assert [one.greedy for one in found] == [True, False]


def test_each_pass_is_told(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes have every request once, with the result that is returned."""
    monkeypatch.setattr(likelihood, "BLOCK", 50)
    seen: list[dict[int, LogLikelihood]] = []
    found = Likelihoods(loaded(), tokens=50).of(asked(), lambda made: seen.append(dict(made)))
    assert sorted(number for one in seen for number in one) == list(range(40))
    assert len(seen) > 5
    for one in seen:
        assert one == {number: found[number] for number in one}


def test_known_results_are_not_computed(loaded: Callable[..., LoadedModel]) -> None:
    requests, seen = asked(), []
    known = {number: LogLikelihood(-1.0, False, 1) for number in range(0, 40, 3)}
    model = loaded()
    found = Likelihoods(model).of(requests, seen.append, known)
    assert not known.keys() & {number for one in seen for number in one}
    close(
        found,
        [known.get(number) or alone(model, one) for number, one in enumerate(requests)],
    )


def test_logits_of_padding_rows_do_not_count(loaded: Callable[..., LoadedModel]) -> None:
    """The vocabulary ends before the rows that make it divisible."""
    model, request = loaded(), Scored((1, 2), (3,))
    (before,) = Likelihoods(model).of([request])
    with torch.no_grad():
        model.model.token_embedding.weight[VOCABULARY:] += 9.0
    assert Likelihoods(model).of([request]) == [before]


def test_weights_that_are_not_finite(loaded: Callable[..., LoadedModel]) -> None:
    model = loaded()
    with torch.no_grad():
        model.model.final_norm.weight[0] = torch.nan
    with pytest.raises(RunError, match="logits are not finite"):
        Likelihoods(model).of(asked(4))


def test_a_cache_without_branches(
    loaded: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of a plugin may have another cache: each request is computed alone."""
    model, requests = loaded(), asked()
    monkeypatch.setattr(model.model, "new_cache", lambda _dtype: object())
    close(Likelihoods(model).of(requests), [alone(model, one) for one in requests])


def test_long_contexts_beside_long_answers(loaded: Callable[..., LoadedModel]) -> None:
    """A long context with short answers and a short one with long answers are two passes."""
    long, short = tuple(range(1, 30)), tuple(range(40, 60))
    requests = [Scored(long, (1, 2)), Scored(long, (3,))]
    requests += [Scored(short, tuple(range(12))), Scored(short, (5,))]
    model = loaded()
    assert model.model.shape.max_position_embeddings == 32
    close(Likelihoods(model).of(requests), [alone(model, one) for one in requests])
