"""Samples of Retro: sequences of tokens, with the neighbours of each chunk.

Shapes: B micro-batch, S sequence, L chunks of a sequence, K neighbours of a chunk, R tokens of a
neighbour.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.blend.sources import GPTSamples
from lmcore.data.chunks.database import ChunkDatabase
from lmcore.data.chunks.neighbours import database_path, open_neighbours
from lmcore.data.loading.batch import CausalLMCollation, check_vocabulary
from lmcore.families.gpt.samples import document_masks
from lmcore.families.retro.family import retrieved_length
from lmcore.families.sample_format import SampleFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.chunks.neighbours import Neighbours
    from lmcore.data.dataset.gpt import GPTDataset
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer

    Int64 = npt.NDArray[np.int64]

__all__ = [
    "RetroCollation",
    "RetroDataset",
    "RetroSample",
    "RetroSamples",
    "cycle_of",
    "read_first",
    "samples",
]

_COMMAND = "lmcore data retro"
_COUNTED = {
    True: "the number of steps of this run, repeat these by `--retro-cyclic-train-iters N`",
    False: "the steps, `--eval-iters` and `--eval-interval` of this run",
}
"""Options that say how many samples there are: for training, or for validation and test."""


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The run names no neighbours, or the data does not fit an option.
    """
    retro = plan.config.retro
    if plan.config.data.mock_data:
        raise ConfigError(
            "Retro cannot be trained with `--mock-data`",
            why="its samples have neighbours from a database of text, and random tokens have none",
            hint=f"leave it out, and name the neighbours of your data, found by `{_COMMAND}`, by "
            "`--retro-project-dir`",
        )
    if retro.retro_project_dir is None:
        raise ConfigError(
            "Retro is trained with the neighbours of its samples, and the run names none",
            why="its layers read, for each chunk of a sample, similar chunks of a database",
            hint=f"find them by `{_COMMAND}`, and give its directory by `--retro-project-dir`",
        )
    builder = RetroSamples(
        Path(retro.retro_project_dir),
        tokenizer.fingerprint(),
        chunk_length=retro.retro_chunk_length,
        num_neighbors=retro.retro_num_neighbors,
        num_chunks=retrieved_length(plan.shape) // retro.retro_chunk_length,
        cycle=cycle_of(plan),
        complete=retro.retro_verify_neighbor_count,
        verify=plan.config.data.verify_data,
    )
    inner = CausalLMCollation(plan.vocab_size, document_masks(plan, tokenizer))
    return SampleFormat(builder, RetroCollation(inner))


def cycle_of(plan: RunPlan) -> float:
    """Return the part of the training samples that has neighbours, and that the others repeat."""
    iterations = plan.config.retro.retro_cyclic_train_iters
    return 1.0 if iterations is None else min(1.0, iterations / plan.train_iters)


def read_first(num_samples: int | None, part: str, cycle: float) -> int | None:
    """Return the number of samples of a source that have neighbours, of so many that are read.

    Args:
        num_samples: Number of samples that are read; None for one epoch.
        part: Part of the data: train, valid or test.
        cycle: See `cycle_of`.
    """
    return math.ceil(num_samples * cycle) if num_samples and part == "train" else num_samples


class RetroSample(NamedTuple):
    """A sample.

    Attributes:
        tokens: Token ids, int64 [S + 1].
        neighbors_LKR: Token ids of the neighbours of each chunk.
        padding_LKR: True at their padding.
    """

    tokens: Int64
    neighbors_LKR: Int64
    padding_LKR: npt.NDArray[np.bool_]


class RetroDataset:
    """Samples of a source with their neighbours, in the order of training; see `SourceSamples`.

    Attributes:
        key: Fingerprint of the documents' content, independent of their path.
        order: Fingerprint of the samples in their order, with their neighbours.
    """

    def __init__(
        self, tokens: GPTDataset, neighbours: Neighbours, builder: RetroSamples, count: int
    ) -> None:
        """Join samples and neighbours.

        Args:
            tokens: The samples without neighbours.
            neighbours: Neighbours of these samples.
            builder: Settings.
            count: Number of samples, which begin again after those in *tokens*.
        """
        self._tokens, self._neighbours, self._builder = tokens, neighbours, builder
        self._count, self._cycle = count, len(tokens) if len(tokens) < count else 0
        self.key = tokens.key
        record = neighbours.record
        found = [tokens.order, record.database, record.index, self._cycle]
        self.order = hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Return the number of samples requested."""
        return self._count

    def __getitem__(self, i: int) -> RetroSample:
        """Return sample *i*.

        Raises:
            IndexError: *i* is not in 0 to `len(self) - 1`.
        """
        if not 0 <= i < self._count:
            raise IndexError(f"sample {i} of {self._count}")
        return self.read(i)

    @property
    def available(self) -> int:
        """Number of samples that `read` has."""
        return max(self._count, self._tokens.available) if self._cycle else self._tokens.available

    def read(self, i: int) -> RetroSample:
        """Return sample *i* of those available, also beyond the number requested.

        Raises:
            DataError: A file was cut short since it was opened, or the sample has no neighbours.
        """
        builder, found = self._builder, self._neighbours
        i = i % self._cycle if self._cycle else i
        tokens = self._tokens.read(i)
        if i >= found.num_samples and not builder.complete:
            chunks = (len(tokens) - 1) // found.chunk_length
            read = found.chunk_length * builder.num_chunks
            size = (chunks, builder.num_neighbors, read)
            neighbors_LKR = np.full(size, found.padding, dtype=np.int64)
        else:
            neighbors_LKR = found.tokens(i, builder.num_neighbors, builder.num_chunks)
        return RetroSample(tokens, neighbors_LKR, neighbors_LKR == found.padding)


@dataclass(frozen=True)
class RetroSamples:
    """Builder of Retro's samples; see `SampleBuilder`.

    Attributes:
        directory: Directory of the project with database and neighbours.
        tokenizer: Fingerprint of the run's tokenizer.
        chunk_length: Tokens of a chunk.
        num_neighbors: Neighbours of a chunk.
        num_chunks: Chunks of a neighbour.
        cycle: Part of the training samples that has neighbours; the others repeat them.
        complete: True if every sample must have neighbours.
        verify: True to compare the neighbours' files with their checksums.
    """

    directory: Path
    tokenizer: str
    chunk_length: int
    num_neighbors: int
    num_chunks: int
    cycle: float = 1.0
    complete: bool = True
    verify: bool = False

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> RetroDataset:
        """Return the samples of a source.

        Raises:
            ConfigError: The neighbours do not fit an option.
            DataError: There are no neighbours of these samples in this order, or too few; or the
                documents make no sample.
        """
        own = read_first(num_samples, name, self.cycle)
        tokens = GPTSamples().build(source, own, settings, name=name)
        neighbours = open_neighbours(
            *(self.directory, name),
            description=tokens.order,
            database=lambda: self.database,
            verify=self.verify,
        )
        self._check(neighbours, name, len(tokens))
        return RetroDataset(tokens, neighbours, self, num_samples or len(tokens))

    @functools.cached_property
    def database(self) -> ChunkDatabase:
        """The database of all sources, opened once."""
        return ChunkDatabase(database_path(self.directory), verify=self.verify)

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of whole sequences in the tokens of a source."""
        return GPTSamples().samples_per_epoch(source, settings)

    def _check(self, neighbours: Neighbours, name: str, count: int) -> None:
        """Refuse neighbours that are not the run's.

        Raises:
            ConfigError, DataError: See `build`.
        """
        directory, found = self.directory, neighbours
        if found.chunk_length != self.chunk_length:
            raise ConfigError(
                f"`--retro-chunk-length {self.chunk_length}` is not the length of the chunks in "
                f"`{directory}`, {found.chunk_length}",
                why="neighbours were found for chunks of that length",
                hint=f"use `--retro-chunk-length {found.chunk_length}`, or find neighbours again "
                f"by `{_COMMAND}`",
            )
        if found.num_neighbors < self.num_neighbors:
            raise ConfigError(
                f"`--retro-num-neighbors {self.num_neighbors}` is more than the "
                f"{found.num_neighbors} neighbours of each chunk in `{directory}`",
                hint=f"use `--retro-num-neighbors {found.num_neighbors}`, or find more by "
                f"`{_COMMAND}`",
            )
        if found.database.record.tokenizer != self.tokenizer:
            raise DataError(
                f"the chunks in `{directory}` were made with another tokenizer than the run's",
                why="their fingerprints differ, and the same ids mean other text",
                hint=f"build the database with the run's tokenizer by `{_COMMAND}`",
            )
        if self.complete and found.num_samples < count:
            raise DataError(
                f"`{directory}` has neighbours of {found.num_samples:,} {name} samples, and the "
                f"run reads {count:,} of `{found.record.source}`",
                hint=f"find the others by `{_COMMAND}` with {_COUNTED[name == 'train']}, or read "
                "them without neighbours by `--no-retro-verify-neighbor-count`",
            )


@dataclass(frozen=True)
class RetroCollation:
    """Collation of `RetroSample`.

    The batch has the tensors of `CausalLMCollation`, and

    - neighbors_BLKR: int64, token ids of the neighbours;
    - neighbor_padding_BLKR: bool, True at their padding.

    Attributes:
        inner: Collation of the tokens.
    """

    inner: CausalLMCollation

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """Return the batch of *samples*; see `Collation`."""
        found: Sequence[RetroSample] = samples
        batch = self.inner([sample.tokens for sample in found], first)
        neighbors_BLKR = torch.from_numpy(np.stack([sample.neighbors_LKR for sample in found]))
        if self.inner.vocab_size is not None:
            check_vocabulary(neighbors_BLKR, self.inner.vocab_size, first)
        padding_BLKR = torch.from_numpy(np.stack([sample.padding_LKR for sample in found]))
        return {**batch, "neighbors_BLKR": neighbors_BLKR, "neighbor_padding_BLKR": padding_BLKR}
