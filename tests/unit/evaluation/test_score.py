"""Scores and metrics, by hand."""

from __future__ import annotations

import math

import pytest

from lmcore.evaluation.score import LogLikelihood, Score, metrics_of, score_of
from lmcore.evaluation.task import Choices, Continued, Text


def likely(*values: float, greedy: bool = False) -> list[LogLikelihood]:
    return [LogLikelihood(value, greedy, 2) for value in values]


def test_choices() -> None:
    """The long answer wins for each character, the short one as a whole."""
    example = Choices(("Why?",), (" no", " certainly"), 1)
    score = score_of(example, likely(-3.0, -4.0))
    assert (score.chosen, score.chosen_by_length) == (0, 1)
    assert score.correct == {"acc": 0.0, "acc_norm": 1.0}


def test_share_and_its_error() -> None:
    example = Choices(("Why?",), (" a", " b"), 0)
    right, wrong = (score_of(example, likely(*one)) for one in ((-1, -2), (-2, -1)))
    metric = metrics_of(["acc"], [right, wrong, right, right])["acc"]
    assert metric.value == 0.75
    # variance 3/4 * 1/4 * 4/3 = 1/4 of the sample, of four examples
    assert metric.error == pytest.approx(math.sqrt(0.25 / 4))
    assert metrics_of(["acc"], [right])["acc"].error is None


def test_ends() -> None:
    example = Continued("a", " b")
    scores = [
        score_of(example, likely(-1.0, greedy=True)),
        score_of(example, likely(-3.0, greedy=False)),
    ]
    found = metrics_of(["acc", "perplexity"], scores)
    assert found["acc"].value == 0.5
    assert found["perplexity"].value == pytest.approx(math.exp(2.0))
    # the standard error of the mean is 1; that of its exponential, to first order, exp(2)
    assert found["perplexity"].error == pytest.approx(math.exp(2.0))


def test_texts() -> None:
    """Two windows with four tokens; five words and 20 bytes in the file."""
    example = Text("one two", "one @-@ two three 4é")
    score = score_of(example, likely(-2.0, -6.0))
    names = ["loss", "token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"]
    found = {name: one.value for name, one in metrics_of(names, [score]).items()}
    size = len("one @-@ two three 4é".encode())
    assert found == pytest.approx(
        {
            "loss": 2.0,
            "token_perplexity": math.exp(2.0),
            "word_perplexity": math.exp(8 / 5),
            "byte_perplexity": math.exp(8 / size),
            "bits_per_byte": 8 / size / math.log(2),
        }
    )


def test_extremes() -> None:
    """A model of equal probabilities has chance; perplexity beyond float64 is infinite."""
    score = score_of(Text("a", "a"), likely(-1e6))
    assert metrics_of(["word_perplexity"], [score])["word_perplexity"].value == math.inf


def test_a_perplexity_of_no_words_is_undefined() -> None:
    likelihood = LogLikelihood(-1.0, True, 2)
    found = metrics_of(["word_perplexity"], [Score((likelihood,), bytes=2)])
    assert math.isnan(found["word_perplexity"].value)
