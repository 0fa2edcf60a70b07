"""Samples of a task: pairs of texts as sequences of one length, and their labels.

Shapes: B sequences, S sequence, Q samples, C choices of a question.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import ConfigError, counted
from lmcore.data.task.dataset import TaskDataset, TaskSample
from lmcore.data.tokenizer import special_ids
from lmcore.data.tokenizer.file_tokenizer import added_around, plain_ids
from lmcore.families.bert.samples import second_type
from lmcore.families.sample_format import SampleFormat
from lmcore.model.family import family_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

    Int64 = npt.NDArray[np.int64]

__all__ = ["PairFormat", "TaskCollation", "TaskSamples", "pair_format", "samples"]

logger = logging.getLogger(__name__)


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The tokenizer lacks a special token.
    """
    task = plan.sources.task
    assert task is not None
    pairs = pair_format(plan.shape, tokenizer, plan.config.model.seq_length)
    collation = TaskCollation(pairs, task.num_choices)
    whole = plan.config.training.eval_iters * plan.global_batch_size
    return SampleFormat(TaskSamples(pairs, whole), collation)


def pair_format(shape: ModelShape, tokenizer: Tokenizer, length: int) -> PairFormat:
    """Return the format of the sequences of a model with a head.

    Args:
        shape: Sizes of the model.
        tokenizer: Tokenizer of the texts.
        length: Tokens of a sequence.

    Raises:
        ConfigError: The tokenizer lacks a special token, or the length is too short for a pair.
    """
    body = family_of(shape).body
    assert body is not None
    if body.bidirectional:
        pairs = _bidirectional(tokenizer, length, shape.own["bert_token_types"])
    else:
        pairs = _causal(tokenizer, length)
    if length < pairs.shortest:
        raise ConfigError(
            f"`--seq-length {length}` is too short for a pair of texts",
            why=f"with their special tokens, they have {pairs.shortest} or more",
            hint=f"use `--seq-length {pairs.shortest}` or more",
        )
    return pairs


@dataclass(frozen=True)
class PairFormat:
    """Tokens around and between two texts, and what a sequence has beside its tokens.

    Attributes:
        length: S.
        begin: Tokens before the first text.
        between: Tokens between two texts.
        end: Tokens after the last text.
        pad: Token after the end.
        bidirectional: True: the first token is pooled, the segment of each token and the padding
            are among the tensors; False: the last token is pooled.
        second_type: Segment of the second text; see `second_type`.
    """

    length: int
    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    pad: int
    bidirectional: bool
    second_type: int = 0

    @property
    def shortest(self) -> int:
        """Least length: a token of each text."""
        return self.room_taken(pair=True) + 2

    def room_taken(self, *, pair: bool) -> int:
        """Return the number of tokens beside the texts."""
        return len(self.begin) + len(self.end) + (len(self.between) if pair else 0)

    def join(self, first: Int64, second: Int64 | None) -> tuple[Int64, int]:
        """Return the tokens of a sequence, and the place where the second text begins.

        Texts that are too long are cut at their ends, the longer one first.
        """
        room = self.length - self.room_taken(pair=second is not None)
        if second is None:
            tokens = [*self.begin, *first[:room], *self.end]
            return np.array(tokens, dtype=np.int64), self.length
        cut_a, cut_b = _cut(len(first), len(second), room)
        before = [*self.begin, *first[:cut_a], *self.between]
        tokens = [*before, *second[:cut_b], *self.end]
        return np.array(tokens, dtype=np.int64), len(before)


def _cut(a: int, b: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts after single tokens were cut off the longer one."""
    if a + b <= room:
        return a, b
    least = min(a, b)
    if least <= room // 2:
        return (a, room - a) if a <= b else (room - b, b)
    return room - room // 2, room // 2


def _bidirectional(tokenizer: Tokenizer, length: int, token_types: int) -> PairFormat:
    special = special_ids(tokenizer)
    if special.cls is None or special.sep is None:
        raise ConfigError(
            f"the tokenizer `{tokenizer.name}` cannot make sequences for this model",
            why="its vocabulary has no `[CLS]` and `[SEP]`",
            hint="use the tokenizer that the model was trained with: `--use-checkpoint-args`",
        )
    sep = (special.sep,)
    return PairFormat(
        *(length, (special.cls,), sep, sep),
        pad=special.pad or 0,
        bidirectional=True,
        second_type=second_type(token_types),
    )


def _causal(tokenizer: Tokenizer, length: int) -> PairFormat:
    """Return the format of a decoder: two texts are joined by a line end."""
    between = tuple(plain_ids(tokenizer, "\n")) if tokenizer.encodes_any_text else ()
    begin, end = added_around(tokenizer)
    pad = special_ids(tokenizer).pad
    pad = pad if pad is not None else tokenizer.eod or 0
    return PairFormat(length, begin, between, end, pad=pad, bidirectional=False)


@dataclass(frozen=True)
class TaskSamples:
    """Builder of a task's samples; see `SampleBuilder`.

    Attributes:
        pairs: Format of the sequences.
        whole: Samples of one validation; if these are all rows or more, each validation begins
            with the first row.
    """

    pairs: PairFormat
    whole: int

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> TaskDataset:
        """Return the `TaskDataset` of a source: shuffled for training, else in file order."""
        if name == "train":
            found = TaskDataset(source.indexed, num_samples, seed=settings.seed)
        else:
            rows = source.indexed.document_count
            period = self.whole if self.whole >= rows else None
            found = TaskDataset(source.indexed, num_samples, period=period)
        self._report_long(found, source.name)
        return found

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:  # noqa: ARG002
        """Return the number of rows."""
        return source.indexed.document_count

    def _report_long(self, found: TaskDataset, name: str) -> None:
        pair = found.rows > 0 and bool(found[0].second)
        room = self.pairs.length - self.pairs.room_taken(pair=pair)
        if long := int((found.lengths > room).sum()):
            logger.info(
                "`%s`: %d of %s %s longer than the `--seq-length` of %d tokens and cut",
                name,
                long,
                counted(found.rows, "row"),
                "is" if long == 1 else "are",
                self.pairs.length,
            )


@dataclass(frozen=True)
class TaskCollation:
    """Collation of `TaskSample`; for the tensors see `TaskHead.loss`.

    Attributes:
        pairs: Format of the sequences.
        num_choices: C; 0 for a classification.
    """

    pairs: PairFormat
    num_choices: int

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:  # noqa: ARG002 - a protocol
        """Return the batch of *samples*; see `Collation`."""
        found: Sequence[TaskSample] = samples
        per_sample = self.num_choices or 1
        size = (len(found) * per_sample, self.pairs.length)
        tokens_BS = np.full(size, self.pairs.pad, dtype=np.int64)
        types_BS = np.zeros(size, dtype=np.int64)
        end_B = np.ones(size[0], dtype=np.int64)  # of a choice that a question lacks: one token
        for number, sample in enumerate(found):
            for place, second in enumerate(sample.second or (None,)):
                row = number * per_sample + place
                joined, start = self.pairs.join(sample.first, second)
                end_B[row] = len(joined)
                tokens_BS[row, : len(joined)] = joined
                types_BS[row, start : len(joined)] = self.pairs.second_type
        batch: dict[str, npt.NDArray[Any]] = {"tokens_BS": tokens_BS}
        if self.pairs.bidirectional:
            padding_BS = np.arange(size[1])[None, :] >= end_B[:, None]
            batch |= {"types_BS": types_BS, "padding_BS": padding_BS}
        batch["pooled_B"] = np.zeros_like(end_B) if self.pairs.bidirectional else end_B - 1
        labels = [sample.label for sample in found]
        numbers = np.float32 if isinstance(labels[0], float) else np.int64
        batch["label_Q"] = np.array(labels, dtype=numbers)
        weights = [sample.weight for sample in found]
        batch["label_weight_Q"] = np.array(weights, dtype=np.float32)
        if self.num_choices:
            counts_Q = np.array([len(sample.second) for sample in found])
            batch["choices_QC"] = np.arange(self.num_choices)[None, :] < counts_Q[:, None]
        return {name: torch.from_numpy(values) for name, values in batch.items()}
