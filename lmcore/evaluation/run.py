"""Evaluation of one model on tasks: requests of all examples, their scores, the metrics."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import DataError, counted
from lmcore.evaluation.files import examples_of, iter_examples
from lmcore.evaluation.indexed import require_tokenizer
from lmcore.evaluation.journal import Journal, requests_key
from lmcore.evaluation.likelihood import Likelihoods, PassPool, Scored
from lmcore.evaluation.requests import RequestMaker, positions_read
from lmcore.evaluation.score import (
    LogLikelihood,
    Metric,
    Score,
    check_kind,
    metrics_of,
    score_of,
)
from lmcore.evaluation.task import Choices, Example, Streamed, Task, Tokens
from lmcore.evaluation.texts import score_texts

if TYPE_CHECKING:
    from lmcore.inference.load import LoadedModel

__all__ = [
    "AskedTask",
    "AskedTexts",
    "Evaluation",
    "TaskProgress",
    "TaskResult",
    "ask",
    "evaluate",
    "example_record",
    "identity",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskProgress:
    """Requests of a task so far.

    Attributes:
        task: Name of the task.
        done: Number of requests that are computed.
        total: Number of requests that are to be computed; None: it is not known before all texts
            are read.
        seconds: Time since the first one.
    """

    task: str
    done: int
    total: int | None
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left; None at the beginning, and for texts."""
        if not self.done or self.total is None:
            return None
        return self.seconds / self.done * (self.total - self.done)


@dataclass(frozen=True)
class TaskResult:
    """Scores of a model on a task.

    Attributes:
        task: The task.
        examples: Its examples; none of texts, which are not kept.
        scores: Score of each; of texts, one of all together.
        metrics: The metrics by name.
        cut: Number of contexts that were cut, since the model has too few positions.
        seconds: Time of the model's passes; of texts, with the time of reading.
        count: Number of examples.
    """

    task: Task
    examples: Sequence[Example]
    scores: Sequence[Score]
    metrics: Mapping[str, Metric]
    cut: int
    seconds: float
    count: int

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record of each example that is kept, and its score."""
        for number, (example, score) in enumerate(zip(self.examples, self.scores, strict=False)):
            yield example_record(number, example, score)

    def details(self) -> dict[str, object]:
        """Return what else identifies the scores: nothing."""
        return {}


@dataclass(frozen=True)
class AskedTexts:
    """Texts of a task, which are read while they are scored.

    Attributes:
        task: The task.
        examples: Its examples, taken as they are needed.
    """

    task: Task
    examples: Iterator[Example]


@dataclass(frozen=True)
class AskedTask:
    """Examples of a task, and the requests for log-likelihoods that they make.

    Attributes:
        task: The task.
        examples: Its examples.
        requests: Requests of all examples, in order.
        counts: Number of requests of each example.
        cut: Number of contexts that were cut, since the model has too few positions.
    """

    task: Task
    examples: Sequence[Example]
    requests: Sequence[Scored]
    counts: Sequence[int]
    cut: int

    def result(self, found: Sequence[LogLikelihood], seconds: float) -> TaskResult:
        """Return the scores.

        Args:
            found: Log-likelihood of each request.
            seconds: Time of the model's passes.
        """
        left = iter(found)
        scores = [
            score_of(example, [next(left) for _ in range(count)])
            for example, count in zip(self.examples, self.counts, strict=True)
        ]
        metrics = metrics_of(self.task.metrics, scores)
        count = len(self.examples)
        return TaskResult(self.task, self.examples, scores, metrics, self.cut, seconds, count)


class Evaluation:
    """Evaluation of one model: all tasks are asked, then each is scored."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        tokens: int,
        stride: int | None = None,
        length: int | None = None,
        limit: int | None = None,
        journal: Journal | None = None,
        pool: PassPool | None = None,
    ) -> None:
        """Take the model.

        Args:
            loaded: Causal language model with its tokenizer.
            tokens: Tokens whose results are read from the device together.
            stride: Tokens that each further window of a text predicts; None: as many as the model
                has positions, so that windows do not overlap.
            length: Most tokens that the model reads; None: as many as it has positions.
            limit: Number of examples that are taken from the beginning; None: all.
            journal: File of an earlier evaluation that was stopped, which is continued; None: there
                is none, and none is written.
            pool: Models that compute the passes; None: this one.

        Raises:
            ConfigError: The stride or the length is larger than the model's positions.
        """
        self._model = Likelihoods(loaded, tokens=tokens, pool=pool)
        positions = positions_read(self._model.positions, length, stride)
        self._maker = RequestMaker(
            loaded.tokenizer, positions, stride or positions, stream_stride=stride
        )
        self._limit, self._journal = limit, journal
        self._identity = "" if journal is None else identity(loaded)

    def ask(self, task: Task, files: Sequence[Path]) -> AskedTask | AskedTexts:
        """Return the requests of a task; of texts, which may be large, the first one is read.

        Args:
            task: The task.
            files: Files of the task.

        Raises:
            ConfigError: A metric of the task is for other examples.
            DataError: A file has another layout, or an example has nothing to predict.
        """
        examples = iter_examples(task, files)
        first = next(examples)
        check_kind(task, type(first))
        examples = itertools.islice(itertools.chain([first], examples), self._limit)
        if isinstance(first, Tokens):
            for path in files:
                require_tokenizer(path, self._maker.tokenizer)
        if isinstance(first, Streamed):
            return AskedTexts(task, examples)
        return _asked(task, list(examples), self._maker)

    def score(
        self,
        asked: AskedTask | AskedTexts,
        *,
        progress: Callable[[TaskProgress], None] = lambda _progress: None,
        record: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> TaskResult:
        """Return the model's result on a task.

        Args:
            asked: Result of `ask`; texts can be scored once.
            progress: Called after some passes.
            record: Called with the record of each example, in order; None: none are made.

        Raises:
            DataError: A text cannot be read.
            RunError: The model's logits are not finite.
        """
        if isinstance(asked, AskedTexts):
            return self._score_texts(asked, progress, record)
        requests, journal, begin = asked.requests, self._journal, time.perf_counter()
        key = "" if journal is None else requests_key(self._identity, requests)
        known = {} if journal is None else journal.known(key)
        count, total, name = 0, len(requests) - len(known), asked.task.name

        def done(made: Mapping[int, LogLikelihood]) -> None:
            nonlocal count
            count += len(made)
            if journal is not None:
                journal.add(key, made)
            progress(TaskProgress(name, count, total, time.perf_counter() - begin))

        found = self._model.of(requests, done, known)
        result = asked.result(found, time.perf_counter() - begin)
        if record is not None:
            for each in result.records():
                record(each)
        return result

    def _score_texts(
        self,
        asked: AskedTexts,
        progress: Callable[[TaskProgress], None],
        record: Callable[[Mapping[str, Any]], object] | None,
    ) -> TaskResult:
        name = asked.task.name
        found = score_texts(
            self._model,
            asked.examples,
            self._maker,
            identity=self._identity,
            journal=self._journal,
            progress=lambda done, seconds: progress(TaskProgress(name, done, None, seconds)),
            record=record,
        )
        metrics = metrics_of(asked.task.metrics, [found.score])
        for undefined in [one for one, metric in metrics.items() if math.isnan(metric.value)]:
            logger.warning(
                "`%s` of `%s` is undefined: the texts have nothing to count", undefined, name
            )
        return TaskResult(asked.task, (), (found.score,), metrics, 0, found.seconds, found.count)


def evaluate(
    loaded: LoadedModel,
    task: Task,
    files: Sequence[Path],
    *,
    tokens: int,
    stride: int | None = None,
    limit: int | None = None,
) -> TaskResult:
    """Return a model's result on a task.

    Args:
        loaded, tokens, stride, limit: See `Evaluation`.
        task: The task.
        files: Files of the task.

    Raises:
        ConfigError: The stride is larger than the model's positions.
        DataError: A file has another layout, or an example has nothing to predict.
        RunError: The model's logits are not finite.
    """
    evaluation = Evaluation(loaded, tokens=tokens, stride=stride, limit=limit)
    return evaluation.score(evaluation.ask(task, files))


def ask(
    task: Task, files: Sequence[Path], maker: RequestMaker, limit: int | None = None
) -> AskedTask:
    """Return the examples of a task with their requests.

    Args:
        task: The task.
        files: Files of the task.
        maker: Makes the requests, by the model's tokenizer and positions.
        limit: Number of examples that are taken from the beginning; None: all.

    Raises:
        ConfigError: A metric of the task is for other examples.
        DataError: A file has another layout, or an example has nothing to predict.
    """
    return _asked(task, examples_of(task, files)[:limit], maker)


def _asked(task: Task, examples: Sequence[Example], maker: RequestMaker) -> AskedTask:
    asked = []
    cut = maker.cut
    for number, example in enumerate(examples, 1):
        check_kind(task, type(example))
        try:
            asked.append(_with_common_contexts(maker.of(example)))
        except DataError as error:
            what = f"example {number} of the task `{task.name}`: {error.what}"
            raise DataError(what, why=error.why, hint=error.hint) from error
    cut = maker.cut - cut
    if cut:
        logger.warning(
            "%s of %s: the model has %d positions, and the beginning of their context is left out",
            counted(cut, "request"),
            task.name,
            maker.positions,
        )
    requests = [one for each in asked for one in each]
    return AskedTask(task, examples, requests, [len(each) for each in asked], cut)


def _with_common_contexts(requests: Sequence[Scored]) -> list[Scored]:
    """Return requests whose equal contexts are one object in memory."""
    contexts: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [Scored(contexts.setdefault(one.context, one.context), one.targets) for one in requests]


def identity(loaded: LoadedModel) -> str:
    """Return a text that differs for other checkpoints: files, their sizes and times, the dtype."""
    files = sorted(one for one in loaded.checkpoint.rglob("*") if one.is_file())
    stats = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return f"{loaded.checkpoint.resolve()} {loaded.model.weight_dtype} {stats}"


def example_record(number: int, example: Example, score: Score) -> dict[str, Any]:
    """Return an example and its score for a JSON line.

    Args:
        number: Number of the example, from 0.
        example: The example.
        score: Its score.
    """
    record: dict[str, Any] = {"example": number, **vars(example)}
    record["logprobs"] = [one.logprob for one in score.likelihoods]
    record["greedy"] = [one.greedy for one in score.likelihoods]
    record["tokens"] = [one.tokens for one in score.likelihoods]
    if isinstance(example, Choices):
        record |= {"chosen": score.chosen, "chosen_by_length": score.chosen_by_length}
    return record | dict(score.correct)
