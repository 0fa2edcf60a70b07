"""Scores of the model in training on tasks of `lmcore evaluate`, in every parallel layout.

A pass is the same as in a validation: the model computes its loss of a micro-batch, and its head
keeps the log-probability of each target that counts in place of their mean.  So no rank needs the
whole model.  The passes are divided among the data-parallel ranks; a rank that has none left takes
part with an empty one, as sharded weights are gathered by all.

Shapes: B sequences of a pass, S tokens, T = B * S, H hidden, V vocabulary, N requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import RunError
from lmcore.evaluation.requests import RequestMaker
from lmcore.evaluation.run import AskedTask, TaskResult, ask
from lmcore.evaluation.score import LogLikelihood
from lmcore.parallel.scalar_collectives import all_reduce_exact, all_reduce_scalars
from lmcore.train.compilation import compiles_blocks
from lmcore.train.diagnose.non_finite import HINT, NonFiniteError

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.evaluation.likelihood import Scored
    from lmcore.evaluation.task import Task
    from lmcore.families.layers.head import HeadLoss
    from lmcore.families.protocol import Model
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.state import TrainState

__all__ = ["TaskEvaluator", "TaskScores", "ask_tasks"]

_SHORTEST = 32
"""Least number of tokens of a padded sequence: shorter passes do not pay for their own shape."""
_LOGIT_ROWS = 256
"""Rows of logits that are in memory at once."""


@dataclass(frozen=True)
class TaskScores:
    """Scores of the tasks of a run after a step.

    Attributes:
        values: For each task its metrics, with `NAME_error` for the standard error of a metric that
            has one, and the number of `examples`; None for what is not finite.
        main: Name of the main metric of each task.
        seconds: Time of all passes.
    """

    values: Mapping[str, Mapping[str, float | None]]
    main: Mapping[str, str]
    seconds: float

    @classmethod
    def of(cls, results: Sequence[TaskResult], seconds: float) -> TaskScores:
        """Return the scores in the results of tasks."""
        return cls(
            {result.task.name: _values(result) for result in results},
            {result.task.name: result.task.metrics[0] for result in results},
            seconds,
        )


def _values(result: TaskResult) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, metric in result.metrics.items():
        found[name] = metric.value if math.isfinite(metric.value) else None
        if metric.error is not None:
            found[f"{name}_error"] = metric.error if math.isfinite(metric.error) else None
    return {**found, "examples": len(result.examples)}


def ask_tasks(
    tasks: Sequence[tuple[Task, Sequence[Path]]], plan: RunPlan, tokenizer: Tokenizer
) -> tuple[AskedTask, ...]:
    """Return the tasks of a run with the requests of their examples; all files are read.

    Args:
        tasks: Tasks with their files.
        plan: The run, for the positions of the model and the number of examples.
        tokenizer: Tokenizer of the run.

    Raises:
        DataError: A file has another layout, or an example has nothing to predict.
    """
    positions = plan.shape.max_position_embeddings
    limit = plan.config.evaluation.eval_tasks_limit
    return tuple(
        ask(task, files, RequestMaker(tokenizer, positions, positions), limit)
        for task, files in tasks
    )


class TaskEvaluator:
    """Evaluation of the weights in training on the tasks of a run."""

    def __init__(
        self,
        state: TrainState,
        tasks: Sequence[AskedTask],
        tokenizer: Tokenizer,
        plan: RunPlan,
        runtime: Runtime,
        exits: ExitConditions,
    ) -> None:
        """Evaluate nothing yet.

        Args:
            state: State of the run, with the model.
            tasks: Tasks with their requests.
            tokenizer: Tokenizer of the run, whose tokens may be predicted.
            plan: The run.
            runtime: Device and processes.
            exits: A signal ends an evaluation.

        Raises:
            RunError: The model is not one that tasks can score.
        """
        self._state, self._tasks, self._plan, self._runtime = state, tasks, plan, runtime
        self._vocab_size, self._exits = tokenizer.vocab_size, exits
        if tasks and not state.model.causal:  # of others the settings refuse it
            raise RunError(
                f"`--eval-tasks` cannot score {state.model.family.name} models",
                why="the tasks ask for the probability of each token after those before it",
                hint="leave it out, or train a GPT or Llama model",
            )

    def evaluate(self) -> TaskScores | None:
        """Return the scores of all tasks; None without tasks, and after a signal on any rank.

        All processes must call it.  The random state of training is restored afterwards.

        Raises:
            NonFiniteError: A log-probability is NaN.
        """
        if not self._tasks:
            return None
        results, begin = [], time.perf_counter()
        model = self._state.model
        model.eval()
        try:
            with self._state.evaluation_weights(), self._runtime.rng.preserved(), torch.no_grad():
                for task in self._tasks:
                    started = time.perf_counter()
                    found = self._likelihoods(task)
                    if found is None:
                        return None
                    results.append(task.result(found, time.perf_counter() - started))
        finally:
            model.train()
        return TaskScores.of(results, time.perf_counter() - begin)

    def _likelihoods(self, task: AskedTask) -> list[LogLikelihood] | None:
        """Return the log-likelihood of each request; None if a rank is to stop."""
        requests, parallel, runtime = task.requests, self._state.parallel, self._runtime
        passes, mesh = self._passes(requests), self._state.parallel.mesh
        ranks = self._plan.layout.data
        # Of each request the log-probability, and the number of tokens that are not predicted.
        found = torch.zeros(2, len(requests), dtype=torch.float64)
        with _recording(self._state.model, self._vocab_size) as recorder:
            for turn in range(-(-len(passes) // ranks)):
                if all_reduce_scalars(runtime, float(self._exits.signalled)) != [0.0]:
                    return None
                number = turn * ranks + mesh.data_rank
                numbers, length = passes[number] if number < len(passes) else ((), passes[-1][1])
                host = _batch([requests[one] for one in numbers], length)
                batch = {name: x.to(runtime.device.torch_device) for name, x in host.items()}
                recorder.begin()
                with runtime.precision.context():
                    parallel.loss(**batch)
                runtime.device.step_boundary()
                if mesh.tensor.rank == 0:  # the others have the same
                    for row, *own in recorder.taken(length // mesh.context.size):
                        found[:, numbers[row]] += torch.tensor(own, dtype=torch.float64)
        sums = all_reduce_exact(runtime, found.flatten()).view(2, -1)
        if sums.isnan().any():
            raise NonFiniteError(
                f"the score of the task `{task.task.name}` is not finite",
                why="the last steps moved the weights too far; they are not saved",
                hint=HINT,
            )
        return [
            LogLikelihood(logprob, missed == 0, len(request.targets))
            for request, logprob, missed in zip(requests, *sums.tolist(), strict=True)
        ]

    def _passes(self, requests: Sequence[Scored]) -> list[tuple[tuple[int, ...], int]]:
        """Return the numbers of the requests of each pass, and the length of its sequences.

        The longest come first: they need the most memory.
        """
        training, model = self._plan.config.training, self._plan.config.model
        most = training.micro_batch_size * model.seq_length
        of_length: dict[int, list[int]] = {length: [] for length in self._lengths()}
        for number, request in enumerate(requests):
            size = len(request.inputs)
            length = min(one for one in of_length if one >= size)
            of_length[length].append(number)
        passes = []
        for length in sorted(of_length, reverse=True):
            held, rows = of_length[length], max(1, most // length)
            starts = range(0, len(held), rows)
            passes += [(tuple(held[start : start + rows]), length) for start in starts]
        return passes

    def _lengths(self) -> list[int]:
        """Return the lengths that sequences are padded to: few, as each may be compiled.

        All are multiples of the parts that a sequence is divided into.
        """
        plan, positions = self._plan, self._plan.shape.max_position_embeddings
        if compiles_blocks(plan, self._runtime.device):  # no other shape than in training
            return sorted({plan.config.model.seq_length, positions})
        parts, found = plan.layout.sequence_parts, [positions]
        while found[-1] >= 2 * _SHORTEST and found[-1] % (2 * parts) == 0:
            found.append(found[-1] // 2)
        return found


def _batch(requests: Sequence[Scored], length: int) -> Batch:
    """Return the micro-batch of some requests, padded; without requests one of nothing to predict.

    Args:
        requests: The requests.
        length: Number of tokens of each sequence.
    """
    rows = max(1, len(requests))
    tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
    targets_BS, weight_BS = torch.zeros_like(tokens_BS), torch.zeros(rows, length)
    for row, request in enumerate(requests):
        inputs, first = request.inputs, len(request.context) - 1
        tokens_BS[row, : len(inputs)] = torch.tensor(inputs)
        targets_BS[row, first : len(inputs)] = torch.tensor(request.targets)
        weight_BS[row, first : len(inputs)] = 1.0
    return {"tokens_BS": tokens_BS, "targets_BS": targets_BS, "loss_weight_BS": weight_BS}


class _Recorder:
    """Loss of a head that keeps the log-probability of each target that counts."""

    def __init__(self, head: HeadLoss, vocab_size: int) -> None:
        self._head, self._vocab_size = head, vocab_size
        self._found: tuple[list[int], list[float], list[bool]] = ([], [], [])

    def begin(self) -> None:
        """Forget the pass before."""
        self._found = ([], [], [])

    def __call__(
        self,
        x_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
        **_rest: Any,
    ) -> Tensor:
        """Keep the scores of the targets with a weight; return 0."""
        places = loss_weight_T.cpu().nonzero().squeeze(1)  # elsewhere, their number is a shape
        logprobs: list[float] = []
        greedy: list[bool] = []
        for part in places.split(_LOGIT_ROWS):
            # Few numbers of rows, as each may be compiled.
            padded = torch.zeros(_padded(len(part)), dtype=torch.int64)
            padded[: len(part)] = part
            padded = padded.to(x_TH.device)
            scores_C, best_C = self._head.scores(
                x_TH[padded], weight_VH, target_T[padded], self._vocab_size
            )
            logprobs += scores_C[: len(part)].tolist()
            greedy += best_C[: len(part)].tolist()
        self._found = (places.tolist(), logprobs, greedy)
        return x_TH.new_zeros((), dtype=torch.float32)

    def taken(self, length: int) -> Iterator[tuple[int, float, int]]:
        """Yield row, log-probability and number of missed tokens of the rows of a pass.

        Args:
            length: Number of tokens that this rank has of each row.
        """
        rows: dict[int, tuple[float, int]] = {}
        for place, logprob, greedy in zip(*self._found, strict=True):
            before, missed = rows.get(place // length, (0.0, 0))
            rows[place // length] = before + logprob, missed + (not greedy)
        for row, (logprob, missed) in rows.items():
            yield row, logprob, missed


def _padded(count: int) -> int:
    """Return the power of two that is not less, at least 16 and at most `_LOGIT_ROWS`."""
    return min(_LOGIT_ROWS, max(16, 1 << (count - 1).bit_length()))


@contextmanager
def _recording(model: Model, vocab_size: int) -> Iterator[_Recorder]:
    """Let the head of a model, if this part has it, keep scores within the context."""
    head = getattr(model, "head_loss", None)
    recorder = _Recorder(head, vocab_size)  # type: ignore[arg-type]
    if head is not None:
        model.head_loss = recorder  # type: ignore[assignment]
    try:
        yield recorder
    finally:
        if head is not None:
            model.head_loss = head
