"""Search for the neighbours of the chunks of a dataset's samples, block by block.

Chunks of the documents that a sample has tokens of are no neighbours of its chunks.
Shapes: n samples of a block, L chunks of a sample, C tokens of a chunk, K neighbours of a chunk.

Source: Megatron-LM, `megatron/core/datasets/retro/query/query.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmcore.base.errors import ConfigError
from lmcore.data.chunks.neighbours import (
    Neighbours,
    NeighboursRecord,
    begin_neighbours,
    neighbours_path,
    neighbours_store,
    require_same_search,
)
from lmcore.retrieval.index_encoder import require_encoder

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.data.chunks.database import ChunkDatabase
    from lmcore.data.dataset.gpt import GPTDataset
    from lmcore.data.indexed.dataset import IndexedDataset
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.retrieval.chunk_encoder import ChunkEncoder
    from lmcore.retrieval.chunk_index import ChunkIndex

    Int64 = npt.NDArray[np.int64]

__all__ = ["NeighbourSettings", "SourceQueries", "find_neighbours", "require_new_search"]

logger = logging.getLogger(__name__)

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class NeighbourSettings:
    """Settings of a search for neighbours.

    Attributes:
        num_queried: Nearest chunks of each chunk, among which neighbours are chosen.
        num_neighbors: K, the most of them that are saved.
        block: Chunks of samples that are encoded and compared together, about.
        batch: Number of chunks that are encoded together.
    """

    num_queried: int
    num_neighbors: int
    block: int
    batch: int


@dataclass(frozen=True)
class SourceQueries:
    """Samples of a source whose neighbours are looked for.

    Attributes:
        part: Part of the data: train, valid or test.
        name: The user's name of the source.
        indexed: Its dataset.
        samples: Its samples.
        num_samples: Number of samples that get neighbours, the first ones.
        seq_length: Tokens of a sample, without the last target.
    """

    part: str
    name: str
    indexed: IndexedDataset
    samples: GPTDataset
    num_samples: int
    seq_length: int


def require_new_search(
    directory: Path,
    queries: SourceQueries,
    database: ChunkDatabase,
    index: str,
    settings: NeighbourSettings,
) -> None:
    """Refuse neighbours of a source that are there already and were found in another way.

    Args:
        directory: Directory of the project.
        queries: The samples.
        database: Database of the chunks.
        index: Fingerprint of the index that will be searched.
        settings: Settings of the search.

    Raises:
        ConfigError: They were.
        DataError: Their record is damaged.
    """
    path = neighbours_path(directory, queries.part, queries.samples.order)
    require_same_search(path, _record(queries, database, index, settings))


def _record(
    queries: SourceQueries, database: ChunkDatabase, index: str, settings: NeighbourSettings
) -> NeighboursRecord:
    length = database.record.chunk_length
    return NeighboursRecord(
        part=queries.part,
        samples=queries.samples.order,
        source=queries.name,
        seq_length=queries.seq_length,
        chunk_length=length,
        num_neighbors=settings.num_neighbors,
        num_queried=settings.num_queried,
        num_samples=queries.num_samples,
        block=max(settings.block // (queries.seq_length // length), 1),
        database=database.record.fingerprint,
        index=index,
    )


def find_neighbours(
    directory: Path,
    queries: SourceQueries,
    database: ChunkDatabase,
    index: ChunkIndex,
    encoder: ChunkEncoder,
    tokenizer: Tokenizer,
    settings: NeighbourSettings,
) -> Neighbours:
    """Write the missing neighbours of a source's samples, wait for other processes, return them.

    Args:
        directory: Directory of the project.
        queries: The samples.
        database: Database of the chunks.
        index: Index of their vectors.
        encoder: The encoder that built it.
        tokenizer: Tokenizer of the data.
        settings: Settings of the search.

    Raises:
        ConfigError: The encoder or the database is not the index's, chunks do not divide samples,
            or the directory has neighbours that were found in another way.
        DataError: A file is damaged.
    """
    length = database.record.chunk_length
    if queries.seq_length % length:
        raise ConfigError(
            f"chunks of {length} tokens do not divide samples of {queries.seq_length} tokens",
            hint="use a `--seq-length` that is a multiple of `--retro-chunk-length`",
        )
    require_encoder(index, encoder)
    index.require_database(database)
    chunks = queries.seq_length // length
    path = neighbours_path(directory, queries.part, queries.samples.order)
    record = begin_neighbours(path, _record(queries, database, index.fingerprint, settings))
    sets = _numbers_of(database, queries.indexed)

    def make(number: int) -> npt.NDArray[np.signedinteger]:
        first = number * record.block
        samples = range(first, first + record.rows[number])
        texts = _texts(queries.samples, samples, length, tokenizer)
        vectors = encoder.queries(texts, batch=settings.batch)
        found = index.search(vectors, settings.num_queried).blocks
        kept = _without_own(found, samples, queries.samples, database, sets, chunks)
        kept = _first(kept, settings.num_neighbors)
        small = database.chunks <= _LARGEST
        return kept.reshape(len(samples), chunks, -1).astype(np.int32 if small else np.int64)

    neighbours_store(path).build(record.rows, make, wait=True, unit=f"{queries.part} samples")
    return Neighbours(path, database, verify=True)


def _numbers_of(database: ChunkDatabase, indexed: IndexedDataset) -> list[int]:
    """Return the numbers of a dataset in the database: none, one or, for several parts, several."""
    path = str(Path(indexed.prefix).resolve())
    return [number for number, one in enumerate(database.record.data_paths) if one == path]


def _texts(
    dataset: GPTDataset, samples: Sequence[int], length: int, tokenizer: Tokenizer
) -> list[str]:
    """Return the texts of the chunks of samples, without end-of-document tokens."""
    parts = [dataset.read(sample)[:-1].reshape(-1, length) for sample in samples]
    chunks = np.concatenate(parts)
    return [tokenizer.decode(one[one != tokenizer.eod].tolist()) for one in chunks]


def _without_own(
    found: Int64,
    samples: Sequence[int],
    dataset: GPTDataset,
    database: ChunkDatabase,
    sets: Sequence[int],
    chunks: int,
) -> Int64:
    """Return the chunks found, [n * L, K], with -1 for chunks of the sample's own documents."""
    kept = found.copy()
    there = found >= 0
    rows = np.full((*found.shape, 2), -1, dtype=np.int64)
    rows[there] = database.rows(found[there])[:, :2]
    own_set = np.isin(rows[..., 0], sets)
    for place, sample in enumerate(samples):
        at = slice(place * chunks, (place + 1) * chunks)
        own = own_set[at] & np.isin(rows[at, :, 1], dataset.documents(sample))
        kept[at][own] = -1
    return kept


def _first(kept: Int64, count: int) -> Int64:
    """Return the first *count* numbers of each row that are not -1, filled with -1."""
    order = np.argsort(kept < 0, axis=1, kind="stable")[:, :count]
    first = np.take_along_axis(kept, order, axis=1)
    return np.pad(first, ((0, 0), (0, count - first.shape[1])), constant_values=-1)
