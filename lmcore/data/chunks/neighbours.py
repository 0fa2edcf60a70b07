"""`Neighbours`: the chunks of a database that are nearest to the chunks of a dataset's samples.

    neighbours.json     samples, database and search; see `NeighboursRecord`
    shard-00000.npy     int32 or int64 [n, L, K]: numbers of chunks, the nearest first; -1: none

They belong to the samples of one source in one order, whose fingerprint is in the name of their
directory, `neighbours/train-0123456789abcdef` in the directory of the project.  A blend reads the
neighbours of each of its sources.
Shapes: n samples of a shard, L chunks of a sample, K neighbours of a chunk, R tokens of a
neighbour and the chunks that follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lmcore.base.errors import DataError
from lmcore.data.chunks.database import COMMAND, ChunkDatabase, DatabaseRecord
from lmcore.data.chunks.store import ShardStore, begin, read_record, require_equal

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]

__all__ = [
    "Neighbours",
    "NeighboursRecord",
    "begin_neighbours",
    "database_path",
    "neighbours_path",
    "neighbours_store",
    "open_neighbours",
    "require_same_search",
]

_RECORD = "neighbours.json"
_DIMENSIONS = 3


@dataclass(frozen=True)
class NeighboursRecord:
    """Content of `neighbours.json`.

    Attributes:
        part: Part of the data: train, valid or test.
        samples: Fingerprint of the order of the samples (`GPTDataset.order`).
        source: The user's name of their source, for messages.
        seq_length: Tokens of a sample.
        chunk_length: Tokens of a chunk.
        num_neighbors: K.
        num_queried: Nearest chunks among which K of other documents were looked for.
        num_samples: Number of samples with neighbours when the last shard is written.
        block: Samples of a shard.
        database: Fingerprint of the database.
        index: Fingerprint of the index: its encoder, and how it was searched.
    """

    part: str
    samples: str
    source: str
    seq_length: int
    chunk_length: int
    num_neighbors: int
    num_queried: int
    num_samples: int
    block: int
    database: str
    index: str
    counts: ClassVar[tuple[str, ...]] = (
        *("seq_length", "chunk_length", "num_neighbors", "num_queried", "num_samples", "block"),
    )

    @property
    def sample_chunks(self) -> int:
        """L."""
        return self.seq_length // self.chunk_length

    @property
    def rows(self) -> list[int]:
        """Number of samples of each shard."""
        starts = range(0, self.num_samples, self.block)
        return [min(self.block, self.num_samples - start) for start in starts]


_PARTS = {
    "part": "part of the data",
    "samples": "order of samples",
    "seq_length": "sequence length",
    "chunk_length": "length of the chunks",
    "num_neighbors": "number of neighbours",
    "num_queried": "number of neighbours that are looked for",
    "block": "number of samples of a shard",
    "database": "database of chunks",
    "index": "index",
}


def database_path(directory: Path) -> Path:
    """Return the path of the database of chunks of a project."""
    return directory / "database"


def neighbours_path(directory: Path, part: str, description: str) -> Path:
    """Return the path of the neighbours of a part's samples in a project; see `open_neighbours`."""
    return directory / "neighbours" / f"{part}-{description[:16]}"


def neighbours_store(path: Path) -> ShardStore:
    """Return the shards of neighbours."""
    return ShardStore(path, "set of neighbours", COMMAND)


def require_same_search(path: Path, record: NeighboursRecord) -> None:
    """Refuse neighbours that are there already and were found in another way.

    Raises:
        ConfigError: They were.
        DataError: Their record is damaged.
    """
    if (path / _RECORD).exists():
        require_equal(path / _RECORD, record, neighbours_store(path), _PARTS)


def begin_neighbours(path: Path, record: NeighboursRecord) -> NeighboursRecord:
    """Write the record of neighbours, and return it; the number of samples only grows.

    Raises:
        ConfigError: The directory has the neighbours of other parts.
        DataError: The record that is there is damaged.
    """
    store = neighbours_store(path)
    if (path / _RECORD).exists():
        found = read_record(path / _RECORD, NeighboursRecord, store)
        if found.num_samples > record.num_samples:
            values = {**vars(record), "num_samples": found.num_samples}
            record = NeighboursRecord(**values)
    begin(path / _RECORD, record, store, _PARTS)
    return record


def _other_database(record: NeighboursRecord, database: DatabaseRecord) -> str:
    """Return how a database differs from the database in which neighbours were found."""
    before, now = record.chunk_length, database.chunk_length
    if before != now:
        return (
            f"they were found for chunks of {before} tokens, and the database has chunks of {now}"
        )
    return (
        f"both have chunks of {now} tokens; the tokenizer or the documents differ: they were found "
        f"in the database {record.database[:16]}, this one is {database.fingerprint[:16]}"
    )


class Neighbours:
    """Neighbours of the chunks of the samples of a dataset, as `lmcore data retro` wrote them.

    Attributes:
        path: Their directory.
        record: Their record.
        database: The database whose chunks they are.
        chunk_length: Tokens of a chunk.
        num_samples: Number of samples that have neighbours.
        num_neighbors: Number of neighbours saved for each chunk.
        padding: Token that fills short chunks: the end-of-document token.
    """

    def __init__(self, path: Path, database: ChunkDatabase, *, verify: bool = False) -> None:
        """Open neighbours.

        Args:
            path: Their directory.
            database: The database that they were found in.
            verify: True to compare the shards with their checksums, not only with their sizes.

        Raises:
            DataError: They are missing, half written, damaged, or were found in another database.
        """
        store = neighbours_store(path)
        self.path = path
        self.record = record = read_record(path / _RECORD, NeighboursRecord, store)
        self.database = database
        if record.database != database.record.fingerprint:
            raise DataError(
                f"the neighbours `{path}` are not chunks of the database `{database.path}`",
                why=_other_database(record, database.record),
                hint=f"remove them, and run `{COMMAND}` again",
            )
        store.require_complete(record.rows)
        self._shards = []
        for number, rows in enumerate(record.rows):
            shard = store.open(number, verify=verify)
            wanted = (record.sample_chunks, record.num_neighbors)
            if shard.ndim != _DIMENSIONS or len(shard) < rows or shard.shape[1:] != wanted:
                raise store.damaged(number, f"it has {shard.dtype} {list(shard.shape)}")
            self._shards.append(shard)
        self.chunk_length, self.num_neighbors = record.chunk_length, record.num_neighbors
        self.num_samples, self.padding = record.num_samples, database.record.end

    def chunks(self, sample: int) -> npt.NDArray[np.integer[Any]]:
        """Return the numbers of a sample's neighbours, the nearest first, [L, K]; -1: none.

        Args:
            sample: Number of the sample in the order of training, as the dataset's own `read` and
                `__getitem__` take it.

        Raises:
            DataError: The sample has no neighbours.
        """
        if not 0 <= sample < self.num_samples:
            raise DataError(
                f"sample {sample} of `{self.record.source}` has no neighbours",
                why=f"they were found for {self.num_samples:,} samples",
                hint=f"run `{COMMAND}` again with the length of this run: it adds what is missing",
            )
        shard, row = divmod(sample, self.record.block)
        found: npt.NDArray[np.integer[Any]] = self._shards[shard][row]
        return found

    def tokens(self, sample: int, neighbors: int, chunks: int) -> Int64:
        """Return the tokens of a sample's neighbours, the nearest first, [L, K, R].

        A chunk with fewer neighbours than asked, because others are of the sample's own documents,
        has rows of padding instead.  So has the end of a neighbour whose document ends.

        Args:
            sample: Number of the sample; see `chunks`.
            neighbors: K, at most `num_neighbors`.
            chunks: Number of chunks of a neighbour: itself, and the next ones of its document.
                R is this number times the chunk length.

        Raises:
            DataError: The sample has no neighbours, or a dataset was cut short.
            ValueError: There are not so many neighbours.
        """
        if not 1 <= neighbors <= self.num_neighbors or chunks < 1:
            raise ValueError(f"{neighbors} of {self.num_neighbors} neighbours, {chunks} chunks")
        numbers_LK = self.chunks(sample)[:, :neighbors].astype(np.int64)
        tokens = self.database.tokens(numbers_LK.ravel(), chunks)
        return tokens.reshape(*numbers_LK.shape, -1)


def open_neighbours(
    directory: Path,
    part: str,
    *,
    description: str,
    database: Callable[[], ChunkDatabase] | None = None,
    verify: bool = False,
) -> Neighbours:
    """Return the neighbours of the samples of one source.

    Args:
        directory: Directory of the project, as given to `lmcore data retro`.
        part: Part of the data: train, valid or test.
        description: Fingerprint of the order of the samples: `GPTDataset.order` of the dataset
            whose sample numbers `Neighbours.tokens` gets, such as the dataset that
            `SampleBuilder.build` makes of a source.
        database: Function that returns the database of the project, if it is open already.
        verify: True to compare the files with their checksums, not only with their sizes.

    Raises:
        DataError: There is no such project, or it has no neighbours of the samples in this order;
            a file is damaged or half written.
    """
    path = neighbours_path(directory, part, description)
    if not directory.is_dir():
        raise DataError(
            f"no such directory: `{directory}`",
            hint=f"`{COMMAND}` makes it, with the neighbours of the samples",
        )
    if not path.is_dir():
        folder = path.parent
        others = sorted(one.name for one in folder.glob(f"{part}-*")) if folder.is_dir() else []
        if not others:
            raise DataError(
                f"`{directory}` has no neighbours of {part} samples",
                why="the directory is no project, or neighbours were found for other parts alone",
                hint=f"run `{COMMAND}` with this directory and the options of this run",
            )
        raise DataError(
            f"`{directory}` has no neighbours of the {part} samples in their order of this run",
            why=f"the order is {description[:16]}; neighbours were found for "
            + ", ".join(one.removeprefix(f"{part}-") for one in others[:5]),
            hint=f"run `{COMMAND}` with the data, `--split`, `--seq-length`, `--seed`, the number "
            "of steps, `--eval-iters` and `--eval-interval` of this run",
        )
    if database is None:
        opened = ChunkDatabase(database_path(directory), verify=verify)
    else:
        opened = database()
    found = Neighbours(path, opened, verify=verify)
    if found.record.samples != description:
        raise DataError(
            f"the neighbours `{path}` belong to samples in another order",
            why=f"their order is {found.record.samples}, this run's is {description}",
            hint=f"remove them, and run `{COMMAND}` again",
        )
    return found
