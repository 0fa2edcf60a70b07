"""Indexed dataset of a task, and its samples in the order of training or of the files.

Each row is a document: the first text, the second text or each choice, and the label, which is a
sequence of one number; the number of a regression is one of two, the halves of its float32.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.config.derived.data_source import TaskData
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.indexed.dataset import IndexedDataset, token_dtype
from lmcore.data.indexed.metadata import commit, read_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.task.table import TaskRow, read_rows
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.file_tokenizer import added_around, plain_ids

__all__ = ["TaskDataset", "TaskSample", "prepare_task", "task_sequences"]

Int64 = npt.NDArray[np.int64]

_VERSION = 1


def prepare_task(
    files: Sequence[str], task: TaskData, tokenizer: Tokenizer, directory: Path
) -> str:
    """Tokenize the files of a task into a directory, unless that was done before.

    If several processes share the directory, one process does it and the other processes wait.

    Args:
        files: Files of the task.
        task: Columns, and names of the classes.
        tokenizer: Tokenizer of the texts.
        directory: Directory of the dataset.

    Returns:
        The prefix of the indexed dataset.

    Raises:
        DataError: A file cannot be read, or the tokenizer cannot encode a text.
    """
    fingerprint = tokenizer.fingerprint()
    settings = [_VERSION, task.text, task.choices, task.label, task.labels, fingerprint]
    settings += [["regression"]] * task.regression
    settings += [task.choice_tokens] * (task.choice_tokens is not None)
    settings += ["plain"] * any(added_around(tokenizer))  # earlier data had what is put around
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
    for path in files:
        with Path(path).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    stem = Path(files[0]).name.partition(".")[0]
    prefix = directory / f"{stem}-{digest.hexdigest()[:16]}_task"

    def find() -> str | None:
        return None if read_metadata(prefix) is None else str(prefix)

    def make() -> None:
        _write(prefix, files, task, tokenizer)

    directory.mkdir(parents=True, exist_ok=True)
    what = f"the data of the task, `{files[0]}`"
    return build_or_wait(Path(f"{prefix}.lock"), find, make, what=what)


def _write(prefix: Path, files: Sequence[str], task: TaskData, tokenizer: Tokenizer) -> None:
    classes = {name: number for number, name in enumerate(task.labels)}
    dtype = token_dtype(max(tokenizer.vocab_size, task.num_labels))
    with closing(IndexedDatasetWriter(prefix, dtype)) as writer:
        for row in read_rows(files, task):
            label = _stored(row, classes)
            first, *others = task_sequences(row, tokenizer, task.choice_tokens)
            if not all(first + other for other in others or [[]]):
                raise DataError(
                    f"{row.where}: the text has no token",
                    why=f"`{tokenizer.name}` drops all of its characters",
                    hint="leave the row out",
                )
            sequences = [first, *others, label]
            tokens = [token for sequence in sequences for token in sequence]
            writer.add_document(tokens, [len(sequence) for sequence in sequences])
        commit(writer, tokenizer, append_eod=False, input_files=len(files))


def _stored(row: TaskRow, classes: Mapping[str, int]) -> list[int]:
    """Return the label as it is stored."""
    if isinstance(row.label, float):
        bits = int(np.float32(row.label).view(np.uint32))
        return [bits >> 16, bits & 0xFFFF]
    label = row.label if isinstance(row.label, int) else classes.get(row.label)
    if label is None:
        raise DataError(f"{row.where}: the class `{row.label}` is unknown")
    return [label]


def _label_of(stored: Int64) -> int | float:
    if len(stored) == 1:
        return int(stored[0])
    high, low = stored
    return float(np.uint32(int(high) << 16 | int(low)).view(np.float32))


def task_sequences(
    row: TaskRow, tokenizer: Tokenizer, choice_tokens: int | None = None
) -> list[list[int]]:
    """Return the tokens of the first text, then of the second text or each choice.

    A question of two texts has a context, and the question itself before each choice.

    Args:
        row: The row.
        tokenizer: Tokenizer of the texts.
        choice_tokens: Most tokens of a choice; None: as many as it has.
    """
    first, *second = row.texts
    if row.choices:
        before = f"{second[0]} " if second else ""
        second = [before + choice for choice in row.choices]
    found = [plain_ids(tokenizer, text) for text in (first, *second)]
    if not row.choices:
        return found
    return [found[0], *(one[:choice_tokens] for one in found[1:])]


@dataclass(frozen=True)
class TaskSample:
    """Sample of a task.

    Attributes:
        first: Tokens of the first text.
        second: Tokens of the second text, or of each choice; empty for single texts.
        label: Class, number of the right choice, or the number of a regression, a float.
        weight: 1; 0 for a sample that only fills the last batch of a validation.
    """

    first: Int64
    second: tuple[Int64, ...]
    label: int | float
    weight: float = 1.0


class TaskDataset:
    """Samples of a task.

    In training each pass over the rows is shuffled by itself, so that the order does not depend on
    the length of the run.

    Args:
        indexed: Dataset of `prepare_task`.
        num_samples: Number of samples; None for one pass.
        seed: Seed of the shuffles; None: rows are in the order of the files.
        period: Number of samples of a pass over the rows; those beyond the rows have weight 0.
            None: as many as there are rows.

    Attributes:
        key: Fingerprint of the content, independent of its path.
        order: Fingerprint of content and order.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        num_samples: int | None,
        *,
        seed: int | None = None,
        period: int | None = None,
    ) -> None:
        self._indexed, self._seed = indexed, seed
        self.rows = indexed.document_count
        self.period = period or self.rows
        self._num_samples = self.period if num_samples is None else num_samples
        with indexed.reading("the rows"):
            digest = hashlib.blake2b(np.ascontiguousarray(indexed.sizes).data, digest_size=16)
            digest.update(indexed.stored.data)
        self.key = digest.hexdigest()
        settings = json.dumps([self.key, "task", seed, self.period]).encode()
        self.order = hashlib.blake2b(settings, digest_size=16).hexdigest()
        self._permutation = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """Return the number of samples requested."""
        return self._num_samples

    @property
    def available(self) -> int:
        """Number of samples requested."""
        return self._num_samples

    @property
    def lengths(self) -> Int64:
        """Tokens of each row's longest pair of texts, without special tokens."""
        sizes, ends = self._indexed.sizes.astype(np.int64), self._indexed.document_indices
        first, label = ends[:-1], ends[1:] - 1
        firsts = sizes[first]
        sizes[first] = sizes[label] = 0
        found: Int64 = firsts + np.maximum.reduceat(sizes, first + 1)
        return found

    def read(self, i: int) -> TaskSample:
        """Return sample *i*."""
        return self[i]

    def __getitem__(self, i: int) -> TaskSample:
        """Return sample *i*.

        Raises:
            DataError: A file was cut short since it was opened.
            IndexError: *i* is not the number of a sample.
        """
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        number, place = divmod(i, self.period)
        weight = 1.0 if place < self.rows else 0.0
        row = min(place, self.rows - 1)
        if self._seed is not None:
            row = int(self._permutation(number)[row])
        indices = self._indexed.document_indices
        with self._indexed.reading(f"row {row}"):
            found = [
                self._indexed.get(sequence).astype(np.int64)
                for sequence in range(int(indices[row]), int(indices[row + 1]))
            ]
        first, *second, label = found
        return TaskSample(first, tuple(second), _label_of(label), weight)

    def _shuffled(self, number: int) -> Int64:
        assert self._seed is not None
        return np.random.RandomState((self._seed + number) % 2**32).permutation(self.rows)
