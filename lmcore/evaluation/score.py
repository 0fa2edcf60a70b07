"""Scores: what each example was, and the metrics of a task with their standard errors.

docs/reference/tasks.md defines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from lmcore.base.errors import ConfigError, suggestion
from lmcore.evaluation.task import (
    Choices,
    Continued,
    Example,
    Stream,
    Streamed,
    Task,
    Text,
    TextFile,
    Tokens,
)

__all__ = [
    "METRICS",
    "LogLikelihood",
    "Metric",
    "Score",
    "TextSize",
    "check_kind",
    "check_metrics",
    "metrics_of",
    "score_of",
    "standard_error",
]


@dataclass(frozen=True)
class LogLikelihood:
    """Log-probability of tokens after a context.

    Attributes:
        logprob: Natural logarithm of the probability of all of them.
        greedy: True if each is the most probable one at its place.
        tokens: Number of them.
    """

    logprob: float
    greedy: bool
    tokens: int


@dataclass(frozen=True)
class Score:
    """Likelihoods of an example by a model, and what follows from them.

    Attributes:
        likelihoods: Log-likelihood of each window of a text, of its end, or of each choice.
        chosen: Number of the most probable choice; -1 for other examples.
        chosen_by_length: The same by log-probability for each character.
        correct: By metric, 1 or 0.
        words: Number of words of a text as it is in its file; 0 for other examples.
        bytes: Number of bytes of such a text.
    """

    likelihoods: tuple[LogLikelihood, ...]
    chosen: int = -1
    chosen_by_length: int = -1
    correct: Mapping[str, float] = field(default_factory=dict)
    words: int = 0
    bytes: int = 0

    @property
    def logprob(self) -> float:
        """Log-probability of all that was predicted, for one text or end."""
        return sum(one.logprob for one in self.likelihoods)

    @property
    def tokens(self) -> int:
        """Number of tokens that were predicted."""
        return sum(one.tokens for one in self.likelihoods)


@dataclass(frozen=True)
class Metric:
    """Value of a metric.

    Attributes:
        value: The value.
        error: Standard error of the mean over the examples; None where it is not defined.
    """

    value: float
    error: float | None = None


@dataclass
class TextSize:
    """Size of a text that is read in pieces.

    Attributes:
        words: Number of its parts between white space.
        bytes: Number of its bytes in UTF-8.
    """

    words: int = 0
    bytes: int = 0
    _in_word: bool = False

    def add(self, piece: str) -> None:
        """Count a further piece of the text."""
        if not piece:
            return
        self.words += len(piece.split()) - (self._in_word and not piece[0].isspace())
        self._in_word = not piece[-1].isspace()
        self.bytes += len(piece.encode())


def score_of(example: Example, likelihoods: Sequence[LogLikelihood]) -> Score:
    """Return the score of an example.

    Args:
        example: The example.
        likelihoods: Log-likelihood of each of its requests, in order.
    """
    held = tuple(likelihoods)
    if isinstance(example, Stream | Tokens):
        return Score(held, words=example.words if isinstance(example, Stream) else 0)
    if isinstance(example, Text | TextFile):
        size = TextSize()
        for piece in [example.original] if isinstance(example, Text) else example.pieces():
            size.add(piece)
        return Score(held, words=size.words, bytes=size.bytes)
    if isinstance(example, Continued):
        return Score(held, correct={"acc": float(held[0].greedy)})
    assert isinstance(example, Choices)
    plain = [one.logprob for one in held]
    # As lm-eval-harness: for each character of the answer, the space before it left out.
    lengths = [max(1, len(text.removeprefix(" "))) for text in example.choices]
    divided = [value / length for value, length in zip(plain, lengths, strict=True)]
    best, by_length = (max(range(len(held)), key=values.__getitem__) for values in (plain, divided))
    correct = {"acc": float(best == example.gold), "acc_norm": float(by_length == example.gold)}
    return Score(held, best, by_length, correct)


def check_metrics(task: Task) -> None:
    """Raise unless there are all metrics that a task names.

    Raises:
        ConfigError: There is no such metric, or `metrics` is no list.
    """
    unknown = [name for name in task.metrics if name not in METRICS]
    if unknown or isinstance(task.metrics, str):
        raise ConfigError(
            f"the task `{task.name}` has no metric `{unknown[0] if unknown else task.metrics}`",
            why="`metrics` is a list of names" if isinstance(task.metrics, str) else None,
            hint=suggestion("" if isinstance(task.metrics, str) else unknown[0], METRICS),
        )


def check_kind(task: Task, kind: type[Example]) -> None:
    """Raise unless all metrics of a task are defined for a kind of examples.

    Args:
        task: The task, whose metrics are known ones.
        kind: Class of its examples.

    Raises:
        ConfigError: A metric is for other examples.
    """
    fitting = [name for name, one in METRICS.items() if issubclass(kind, one.kinds)]
    for name in task.metrics:
        if name not in fitting:
            raise ConfigError(
                f"the task `{task.name}` has the metric `{name}`, which its examples do not have",
                why=f"they are {next(_KINDS[one] for one in kind.mro() if one in _KINDS)}",
                hint=f"the metrics that fit are {', '.join(f'`{one}`' for one in fitting)}",
            )


def metrics_of(names: Sequence[str], scores: Sequence[Score]) -> dict[str, Metric]:
    """Return the metrics of a task.

    Args:
        names: Names of metrics.
        scores: Score of each example.
    """
    return {name: METRICS[name].function(name, scores) for name in names}


def _share(name: str, scores: Sequence[Score]) -> Metric:
    values = [one.correct[name] for one in scores]
    return Metric(math.fsum(values) / len(values), standard_error(values))


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean, by the sample's variance; None of one value.

    Args:
        values: The values.
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def _end_perplexity(_name: str, scores: Sequence[Score]) -> Metric:
    """Return exp of the negative mean log-probability of an end, whatever its tokens."""
    values = [one.logprob for one in scores]
    value = _exp(-math.fsum(values) / len(values))
    error = standard_error(values)
    return Metric(value, None if error is None else value * error)


def _loss(_name: str, scores: Sequence[Score]) -> Metric:
    return Metric(_per(scores, [one.tokens for one in scores]))


def _token_perplexity(_name: str, scores: Sequence[Score]) -> Metric:
    return Metric(_exp(_per(scores, [one.tokens for one in scores])))


def _word_perplexity(_name: str, scores: Sequence[Score]) -> Metric:
    return Metric(_exp(_per(scores, [one.words for one in scores])))


def _adjusted_perplexity(_name: str, scores: Sequence[Score]) -> Metric:
    """Return the perplexity of a word of streams, with Megatron's bound of the exponent."""
    return Metric(_exp(min(20.0, _per(scores, [one.words for one in scores]))))


def _byte_perplexity(_name: str, scores: Sequence[Score]) -> Metric:
    return Metric(_exp(_per(scores, [one.bytes for one in scores])))


def _bits_per_byte(_name: str, scores: Sequence[Score]) -> Metric:
    return Metric(_per(scores, [one.bytes for one in scores]) / math.log(2))


def _per(scores: Sequence[Score], counts: Sequence[int]) -> float:
    total = sum(counts)
    return -math.fsum(one.logprob for one in scores) / total if total else math.nan


def _exp(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)  # nan stays


@dataclass(frozen=True)
class _Defined:
    """Definition of a metric.

    Attributes:
        function: Returns the value for the metric's name and the scores of all examples.
        kinds: Examples that have it.
    """

    function: Callable[[str, Sequence[Score]], Metric]
    kinds: tuple[type[Example], ...]


_TEXTS = (Text, TextFile)
_KINDS: Mapping[type[Example], str] = {
    **dict.fromkeys(_TEXTS, "texts"),
    Stream: "texts that are predicted as one stream",
    Tokens: "documents of tokens",
    Continued: "texts with their ends",
    Choices: "questions with choices",
}
"""Words for each kind of examples."""

METRICS: Mapping[str, _Defined] = {
    "acc": _Defined(_share, (Continued, Choices)),
    "acc_norm": _Defined(_share, (Choices,)),
    "perplexity": _Defined(_end_perplexity, (Continued,)),
    "loss": _Defined(_loss, (*get_args(Streamed), Continued)),
    "token_perplexity": _Defined(_token_perplexity, (*get_args(Streamed), Continued)),
    "word_perplexity": _Defined(_word_perplexity, _TEXTS),
    "adjusted_perplexity": _Defined(_adjusted_perplexity, (Stream,)),
    "byte_perplexity": _Defined(_byte_perplexity, _TEXTS),
    "bits_per_byte": _Defined(_bits_per_byte, _TEXTS),
}
"""Definition of each metric."""
