"""`HeadModel`: a trained model with a head for a task, and its predictions.

Shapes: B sequences, S sequence, Q samples, L classes or choices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import CheckpointError, RunError
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE
from lmcore.conversion.native.read import LmcoreState
from lmcore.data.task.dataset import TaskSample, task_sequences
from lmcore.data.task.table import TaskRow
from lmcore.evaluation.replicas import replicas
from lmcore.families.build import create_model, op_binding
from lmcore.families.heads.family import CHOICE, CLASSIFICATION
from lmcore.families.heads.model import TaskHead
from lmcore.families.heads.samples import TaskCollation, pair_format
from lmcore.inference.load import allocate, open_checkpoint
from lmcore.inference.text_model import Execution
from lmcore.model.family import family_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.evaluation.finetune.record import LabelledRow
    from lmcore.evaluation.replicas import Replicas
    from lmcore.families.heads.samples import PairFormat
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.process.rendezvous import Rendezvous
    from lmcore.runtime.runtime import Runtime

__all__ = ["HeadModel", "Predictions", "load_head"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_STEP = 8
"""Tokens to whose multiples sequences are padded, so that kernels see few sizes."""


@dataclass(frozen=True)
class Predictions:
    """Outputs of a head.

    Attributes:
        scores: Logits of each row's classes or choices; one number of a regression.
        cut: Number of rows that are longer than the sequence.
    """

    scores: list[list[float]]
    cut: int


@dataclass(frozen=True)
class HeadPass:
    """Samples that are computed together.

    Attributes:
        samples: The samples.
        length: Tokens of the longest sequence.
    """

    samples: list[TaskSample]
    length: int

    def record(self) -> list[Any]:
        """Return the pass as a JSON value."""
        texts = [
            [one.first.tolist(), [second.tolist() for second in one.second]] for one in self.samples
        ]
        return [self.length, texts]

    @classmethod
    def of(cls, record: Sequence[Any]) -> HeadPass:
        """Return the pass of a JSON value."""
        length, texts = record

        def array(tokens: list[int]) -> npt.NDArray[np.int64]:
            return np.array(tokens, dtype=np.int64)

        samples = [TaskSample(array(one), tuple(map(array, two)), 0) for one, two in texts]
        return cls(samples, length)


@dataclass(frozen=True)
class HeadModel:
    """Model with a head for a task, in evaluation mode.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        execution: Context of forward passes.
        pairs: Format of the sequences.
        labels: Names of the classes in the order of the outputs; empty for other heads.
        choice_tokens: Most tokens of a question with a choice; None: as many as it has.
        checkpoint: Directory of the checkpoint.
    """

    model: TaskHead
    tokenizer: Tokenizer
    execution: Execution
    pairs: PairFormat
    labels: tuple[str, ...]
    choice_tokens: int | None
    checkpoint: Path

    @property
    def task(self) -> str:
        """Value of `--task` that the head was trained with."""
        return self.model.shape.task

    def predict(
        self,
        rows: Sequence[LabelledRow],
        *,
        tokens: int,
        progress: Callable[[int], None] = lambda _count: None,
        pool: Replicas | None = None,
    ) -> Predictions:
        """Return the head's outputs.

        Args:
            rows: The rows.
            tokens: Tokens of a pass, at most, but for a single row.
            progress: Called after some passes with the number of their rows.
            pool: Replicas that compute the passes, which are the same; None: this model alone.

        Raises:
            RunError: A number is not finite.
        """
        samples, lengths, cut = [], [], 0
        for row in rows:
            sample = self._sample(row)
            length, is_cut = self._length(sample)
            samples.append(sample)
            lengths.append(length)
            cut += is_cut
        found: list[list[float]] = [[] for _ in rows]
        order = sorted(range(len(rows)), key=lambda number: -lengths[number])
        left = _batches(order, lengths, samples, tokens)
        while batches := list(itertools.islice(left, 1 if pool is None else pool.size)):
            asked = [
                HeadPass([samples[number] for number in batch], lengths[batch[0]])
                for batch in batches
            ]
            if pool is None:
                outputs = self._passes(asked)
            else:
                outputs = pool.share(asked, self._passes, HeadPass.record, _scores)
            for batch, scored in zip(batches, outputs, strict=True):
                for number, scores in zip(batch, scored, strict=True):
                    count = max(1, len(samples[number].second)) if self.task == CHOICE else None
                    found[number] = scores[:count]
            progress(sum(map(len, batches)))
        if any(not np.isfinite(one).all() for one in found):
            raise RunError(
                f"the head of `{self.checkpoint}` gives numbers that are not finite",
                hint="use `--precision fp32`, or an earlier checkpoint",
            )
        return Predictions(found, cut)

    @contextmanager
    def replicas(self, rendezvous: Rendezvous, layout: ParallelLayout) -> Iterator[Replicas | None]:
        """Yield the replicas on rank 0; on other ranks, None when their passes are computed.

        Args:
            rendezvous: Connection of all processes.
            layout: Sizes of the axes: `data` replicas.

        Raises:
            RunError: A process stopped.
        """

        def compute(given: list[Any]) -> list[Any]:
            return self._passes([HeadPass.of(one) for one in given])

        with replicas(rendezvous, layout, compute) as shared:
            yield shared

    def _passes(self, passes: Sequence[HeadPass]) -> list[list[list[float]]]:
        return [self._pass(one.samples, one.length) for one in passes]

    def _sample(self, row: LabelledRow) -> TaskSample:
        known = TaskRow(row.texts, row.choices, 0, row.where)
        first, *others = task_sequences(known, self.tokenizer, self.choice_tokens)
        arrays = [np.array(one, dtype=np.int64) for one in (first, *others)]
        return TaskSample(arrays[0], tuple(arrays[1:]), 0)

    def _length(self, sample: TaskSample) -> tuple[int, bool]:
        """Return the tokens of the longest sequence of a sample, and True if one is cut."""
        around = self.pairs.room_taken(pair=bool(sample.second))
        whole = len(sample.first) + max((len(one) for one in sample.second), default=0) + around
        return max(1, min(whole, self.pairs.length)), whole > self.pairs.length

    def _pass(self, samples: list[TaskSample], longest: int) -> list[list[float]]:
        length = min(self.pairs.length, -(-longest // _STEP) * _STEP)
        pairs = dataclasses.replace(self.pairs, length=length)
        choices = max(len(one.second) for one in samples) if self.task == CHOICE else 0
        batch = TaskCollation(pairs, choices)(samples, 0)
        device = next(self.model.parameters()).device
        inputs: dict[str, Any] = {
            name: tensor.to(device)
            for name, tensor in batch.items()
            if not name.startswith("label_")
        }
        with self.execution.passes():
            outputs = self.model.predictions(**inputs).float().cpu()
        self.execution.step_boundary()
        found: list[list[float]] = outputs.reshape(len(samples), -1).tolist()
        return found


def _scores(values: list[list[float]]) -> list[list[float]]:
    """Return the outputs of a pass from a JSON value: these."""
    return values


def _batches(
    order: Sequence[int], lengths: Sequence[int], samples: Sequence[TaskSample], tokens: int
) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each pass, from the longest."""
    batch: list[int] = []
    sequences = 0
    for number in order:
        more = max(1, len(samples[number].second))
        if batch and (sequences + more) * lengths[batch[0]] > tokens:
            yield batch
            batch, sequences = [], 0
        batch.append(number)
        sequences += more
    if batch:
        yield batch


def load_head(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    length: int | None = None,
) -> HeadModel:
    """Return the model of a fine-tuned checkpoint.

    Args:
        path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`.
        runtime: Device, precision and kernels.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.
        length: Tokens of a sequence; None: as in training.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model has no head for a task.
        ConfigError, DataError: The tokenizer is missing, or is not the run's.
    """

    def require(shape: ModelShape) -> None:
        if not shape.task:
            raise CheckpointError(
                f"the {family_of(shape).name} model of `{path}` has no head for a task",
                why="it is not fine-tuned",
                hint="`lmcore evaluate CHECKPOINT --task NAME --finetune --task-data DIR --save "
                "DIR` trains one and scores it",
            )

    weights, tokenizer = open_checkpoint(path, choice, extra, require)
    state = weights.state
    assert isinstance(state, LmcoreState), "other formats have no such heads"
    shape = state.shape
    body = family_of(shape).body
    assert body is not None
    with torch.device("meta"):
        model = create_model(shape, op_binding(runtime), masked=body.bidirectional)
    assert isinstance(model, TaskHead)
    allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    config = state.manifest.meta.get("config")
    saved = _Saved(config.get("config") if isinstance(config, Mapping) else None)
    labels = saved.labels if shape.task == CLASSIFICATION else ()
    if shape.task == CLASSIFICATION and len(labels) != shape.num_labels:
        raise CheckpointError(
            f"`{state.checkpoint}` names {len(labels)} of its {shape.num_labels} classes",
            why="its setting `task_labels` is missing or was changed",
        )
    length = length or saved.number("model", "seq_length") or shape.max_position_embeddings
    if shape.learned_positions:
        length = min(length, shape.max_position_embeddings)
    return HeadModel(
        model.eval(),
        tokenizer,
        Execution.on(runtime.device, runtime.precision.context),
        pair_format(shape, tokenizer, length),
        labels,
        saved.number("task", "task_choice_tokens"),
        state.checkpoint,
    )


class _Saved:
    """Settings of a checkpoint's run, which may be anything."""

    def __init__(self, config: Any) -> None:
        self._config = config if isinstance(config, Mapping) else {}

    def _of(self, section: str, name: str) -> Any:
        values = self._config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    def number(self, section: str, name: str) -> int | None:
        """Return a whole number above 0; None if there is none."""
        value = self._of(section, name)
        return value if type(value) is int and value > 0 else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes."""
        value = self._of("task", "task_labels")
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            return ()
        return tuple(value)
