"""Evaluation of one model on tasks: requests of all examples, their scores, the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.evaluation.files import examples_of
from lmcore.evaluation.journal import Journal, requests_key
from lmcore.evaluation.likelihood import Likelihoods, Scored
from lmcore.evaluation.requests import RequestMaker
from lmcore.evaluation.score import LogLikelihood, Metric, Score, metrics_of, score_of
from lmcore.evaluation.task import Choices, Example, Task

if TYPE_CHECKING:
    from lmcore.generation.load import LoadedModel

__all__ = [
    "AskedTask",
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
        total: Number of requests that are to be computed.
        seconds: Time since the first one.
    """

    task: str
    done: int
    total: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left; None at the beginning."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None


@dataclass(frozen=True)
class TaskResult:
    """Scores of a model on a task.

    Attributes:
        task: The task.
        examples: Its examples.
        scores: Score of each.
        metrics: The metrics by name.
        cut: Number of contexts that were cut, since the model has too few positions.
        seconds: Time of the model's passes.
    """

    task: Task
    examples: Sequence[Example]
    scores: Sequence[Score]
    metrics: Mapping[str, Metric]
    cut: int
    seconds: float

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record of each example and its score."""
        for number, (example, score) in enumerate(zip(self.examples, self.scores, strict=True)):
            yield example_record(number, example, score)

    def details(self) -> dict[str, object]:
        """Return what else identifies the scores: nothing."""
        return {}


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
        return TaskResult(self.task, self.examples, scores, metrics, self.cut, seconds)


def evaluate(
    loaded: LoadedModel,
    task: Task,
    files: Sequence[Path],
    *,
    tokens: int,
    stride: int | None = None,
    limit: int | None = None,
    progress: Callable[[TaskProgress], None] = lambda _progress: None,
    journal: Journal | None = None,
) -> TaskResult:
    """Return a model's result on a task.

    Args:
        loaded: Causal language model with its tokenizer.
        task: The task.
        files: Files of the task.
        tokens: Tokens of a pass.
        stride: Tokens that each further window of a text predicts; None: as many as the model has
            positions, so that windows do not overlap.
        limit: Number of examples that are taken from the beginning; None: all.
        progress: Called after each pass.
        journal: File of an earlier evaluation that was stopped, which is continued; None: there is
            none, and none is written.

    Raises:
        ConfigError: The stride is larger than the model's positions.
        DataError: A file has another layout, or an example has nothing to predict.
        RunError: The model's logits are not finite.
    """
    model = Likelihoods(loaded, tokens=tokens)
    if stride is not None and stride > model.positions:
        raise ConfigError(
            f"`--stride {stride}` is more than the model's {model.positions} positions",
            why="tokens between two windows would not be predicted",
            hint=f"use `--stride {model.positions}` or less",
        )
    maker = RequestMaker(loaded.tokenizer, model.positions, stride or model.positions)
    asked = ask(task, files, maker, limit)
    requests = asked.requests
    key = "" if journal is None else requests_key(identity(loaded), requests)
    known = {} if journal is None else journal.known(key)
    count, begin = 0, time.perf_counter()

    def done(made: Mapping[int, LogLikelihood]) -> None:
        nonlocal count
        count += len(made)
        if journal is not None:
            journal.add(key, made)
        total = len(requests) - len(known)
        progress(TaskProgress(task.name, count, total, time.perf_counter() - begin))

    found = model.of(requests, done, known)
    return asked.result(found, time.perf_counter() - begin)


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
        DataError: A file has another layout, or an example has nothing to predict.
    """
    examples = examples_of(task, files)[:limit]
    asked = []
    cut = maker.cut
    for number, example in enumerate(examples, 1):
        try:
            asked.append(maker.of(example))
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
