"""Evaluation of one model on tasks of lm-eval-harness: its own evaluator, and results as ours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from lmcore.base.errors import ConfigError, LmcoreError, RunError, nearest
from lmcore.evaluation.harness.model import HarnessModel
from lmcore.evaluation.run import TaskProgress
from lmcore.evaluation.score import Metric

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcore.evaluation.journal import Journal
    from lmcore.evaluation.likelihood import PassPool
    from lmcore.inference.load import LoadedModel

__all__ = ["Catalogue", "HarnessResult"]

_ERROR = "_stderr"


@dataclass(frozen=True)
class HarnessResult:
    """Scores of a model on a task, or on a group of tasks, of lm-eval-harness.

    Attributes:
        name: Name of the task.
        count: Number of its examples.
        metrics: The metrics by name; one of another filter than `none` has the filter's name too.
        version: Version of the task.
        num_fewshot: Number of solved examples before each question; None for a group.
        samples: lm-eval-harness's record of each example.
        seconds: Time of all tasks that were evaluated together.
        cut: 0; lm-eval-harness does not count contexts that are cut.
    """

    name: str
    count: int
    metrics: Mapping[str, Metric]
    version: object
    num_fewshot: int | None
    samples: Sequence[Mapping[str, Any]]
    seconds: float
    cut: int = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record of each example."""
        yield from (dict(one) for one in self.samples)

    def details(self) -> dict[str, object]:
        """Return what else identifies the scores."""
        return {"version": self.version, "num_fewshot": self.num_fewshot}


class Catalogue:
    """Tasks of lm-eval-harness, which are chosen by name."""

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        """Find the tasks; their data are read when they are evaluated.

        Args:
            names: Names of tasks, groups and tags, or patterns such as `mmlu_*`; one may have
                several with commas between.
            include: Directory with further tasks; None: there is none.

        Raises:
            ConfigError: There is no such task.
        """
        asked = [one.strip() for each in names for one in each.split(",") if one.strip()]
        self._manager = TaskManager(include_path=None if include is None else str(include))
        self._names: list[str] = []
        for name in asked:
            found = [name] if Path(name).is_file() else self._manager.match_tasks([name])
            if not found:
                close = nearest(name, self._manager.all_tasks)
                raise ConfigError(
                    f"lm-eval-harness has no task `{name}`",
                    hint=(f"did you mean `{close}`? " if close else "")
                    + "`python -m lmcore.evaluation.harness ls tasks` lists all of them",
                )
            self._names += [one for one in found if one not in self._names]

    def evaluate(
        self,
        loaded: LoadedModel,
        *,
        tokens: int,
        num_fewshot: int | None = None,
        limit: int | None = None,
        chat: bool = False,
        progress: Callable[[TaskProgress], None] = lambda _progress: None,
        journal: Journal | None = None,
        pool: PassPool | None = None,
    ) -> list[HarnessResult]:
        """Return a model's results on all tasks.

        Args:
            loaded: Causal language model with its tokenizer.
            tokens: Tokens of a pass.
            num_fewshot: Number of solved examples before each question; None: the task's own.
            limit: Number of examples of each task that are taken from the beginning; None: all.
            chat: True to ask in the form of the model's chat template.
            progress: Called after each pass.
            journal: File of an earlier evaluation that was stopped, whose results are used; None:
                there is none, and none is written.
            pool: Models that compute the log-likelihoods; None: this one.

        Raises:
            RunError: lm-eval-harness fails, such as for a data set that it cannot get.
        """
        begin = time.perf_counter()
        model = HarnessModel(loaded=loaded, pool=pool, batch_tokens=tokens)
        model.journal = journal

        def report(kind: str, done: int, total: int) -> None:
            progress(TaskProgress(kind, done, total, time.perf_counter() - begin))

        model.progress = report
        try:
            found = simple_evaluate(
                model=model,
                tasks=self._names,
                task_manager=self._manager,
                num_fewshot=num_fewshot,
                limit=limit,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        except LmcoreError:
            raise
        except Exception as error:
            raise RunError(
                f"lm-eval-harness fails on {', '.join(self._names)}",
                why=f"{type(error).__name__}: {error}",
                hint="it downloads the data sets of its tasks, and needs a connection or a copy",
            ) from error
        return list(_results(found, time.perf_counter() - begin))


def _results(found: Mapping[str, Any], seconds: float) -> Iterator[HarnessResult]:
    """Yield the results of tasks and of groups."""
    children = found.get("group_subtasks", {})
    counts = {name: one["effective"] for name, one in found["n-samples"].items()}

    def count(name: str) -> int:
        return counts[name] if name in counts else sum(map(count, children.get(name, ())))

    for name, values in found["results"].items():
        metrics = _metrics(values)
        if metrics:
            yield HarnessResult(
                name,
                count(name),
                metrics,
                found.get("versions", {}).get(name),
                found.get("n-shot", {}).get(name),
                found.get("samples", {}).get(name, ()),
                seconds,
            )


def _metrics(values: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the metrics of lm-eval-harness's values, whose keys are `METRIC,FILTER`."""
    metrics = {}
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith(_ERROR) or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}{_ERROR},{chosen}")
        name = metric if chosen == "none" else f"{metric},{chosen}"
        metrics[name] = Metric(float(value), error if isinstance(error, int | float) else None)
    return metrics
