"""`ChunkDatabase`: the documents of datasets, cut into chunks of equal length.

    database.json       datasets, tokenizer and sizes; see `DatabaseRecord`
    shard-00000.npy     uint32 [n, 4]: dataset, document, first token, number of tokens

A document is one sequence of an indexed dataset, as in the samples of a decoder.  Its
end-of-document token belongs to no chunk, its last chunk may be shorter, and chunks whose text is
blank are left out.  A chunk has the number of its row; its neighbour in the same document follows
it.  Shapes: N chunks, R tokens of chunks that follow each other.

Source: Megatron-LM, `megatron/core/datasets/retro/db/build.py`, which leaves out chunks without
tokens of BERT.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.chunks.store import ShardStore, begin, read_record
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import content_fingerprint

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.data.tokenizer import Tokenizer

    Int64 = npt.NDArray[np.int64]
    Rows = npt.NDArray[np.uint32]

__all__ = ["COMMAND", "ChunkDatabase", "DatabaseRecord", "Documents", "build_database"]

COMMAND = "lmcore data retro"
_RECORD = "database.json"
_COLUMNS = 4
_LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Documents:
    """Documents of one dataset that are cut into chunks.

    Attributes:
        indexed: The dataset.
        sequences: First sequence, and the one after the last.
    """

    indexed: IndexedDataset
    sequences: tuple[int, int]


@dataclass(frozen=True)
class DatabaseRecord:
    """Content of `database.json`.

    Attributes:
        tokenizer: Fingerprint of the tokenizer of the datasets.
        data: Fingerprint of the documents of each dataset.
        data_paths: Absolute prefix of each dataset.
        first: First sequence of each dataset.
        last: Sequence after the last of each dataset.
        chunk_length: Most tokens of a chunk.
        end: End-of-document token, which also fills short chunks.
        block: Documents of a shard.
    """

    tokenizer: str
    data: tuple[str, ...]
    data_paths: tuple[str, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    chunk_length: int
    end: int
    block: int
    counts: ClassVar[tuple[str, ...]] = ("chunk_length", "block")

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the chunks and their order depend on."""
        values = dataclasses.asdict(self)
        del values["data_paths"], values["block"]
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Dataset, first sequence, and the one after the last, of each shard."""
        return [
            (dataset, start, min(start + self.block, last))
            for dataset, (first, last) in enumerate(zip(self.first, self.last, strict=True))
            for start in range(first, last, self.block)
        ]


_PARTS = {
    "tokenizer": "tokenizer",
    "data": "data",
    "first": "range of documents",
    "last": "range of documents",
    "chunk_length": "length of the chunks",
    "end": "end-of-document token",
    "block": "number of documents of a shard",
}


def build_database(
    path: Path,
    documents: Sequence[Documents],
    tokenizer: Tokenizer,
    *,
    chunk_length: int,
    block: int,
    build: bool = True,
) -> ChunkDatabase:
    """Write the missing shards of a database, wait for other processes, and return it.

    Args:
        path: Directory of the database; made if it is missing.
        documents: Documents of each dataset.
        tokenizer: Their tokenizer.
        chunk_length: Most tokens of a chunk.
        block: Documents of a shard.
        build: False to build nothing: the database must be there, of these parts.

    Raises:
        ConfigError: The directory has a database of other data, tokenizer or sizes, or other files;
            the tokenizer has no end-of-document token.
        DataError: The data makes no chunk, a file is damaged, or nothing is built and there is no
            database.
    """
    if tokenizer.eod is None:
        raise ConfigError(
            f"the tokenizer `{tokenizer.name}` has no end-of-document token",
            why="it fills the chunks that are shorter than others",
            hint="use a tokenizer that has one",
        )
    record = DatabaseRecord(
        tokenizer=tokenizer.fingerprint(),
        data=tuple(content_fingerprint(one.indexed, one.sequences) for one in documents),
        data_paths=tuple(str(Path(one.indexed.prefix).resolve()) for one in documents),
        first=tuple(one.sequences[0] for one in documents),
        last=tuple(one.sequences[1] for one in documents),
        chunk_length=chunk_length,
        end=tokenizer.eod,
        block=block,
    )
    store, blocks = _store(path), record.blocks
    if not build:
        read_record(path / _RECORD, DatabaseRecord, store)
    begin(path / _RECORD, record, store, _PARTS, {"data": _other_data})
    if not build:
        return ChunkDatabase(path, verify=True)

    def make(number: int) -> Rows:
        dataset, first, last = blocks[number]
        return _cut(documents[dataset].indexed, record, dataset, (first, last), tokenizer)

    store.build([0] * len(blocks), make, wait=True, unit="chunks")
    return ChunkDatabase(path, verify=True)


def _other_data(theirs: DatabaseRecord, own: DatabaseRecord) -> str:
    """Return how the data of two records differ: by the datasets, or by what these contain."""
    if theirs.data_paths != own.data_paths:
        has, would = (", ".join(f"`{one}`" for one in r.data_paths[:4]) for r in (theirs, own))
        return f"it is of {has}, and this one would be of {would}"
    changed = zip(own.data_paths, theirs.data, own.data, strict=True)
    paths = ", ".join(f"`{path}`" for path, before, now in changed if before != now)
    return f"the documents of {paths} are not what they were"


def _store(path: Path) -> ShardStore:
    return ShardStore(path, "database of chunks", COMMAND)


def _cut(
    indexed: IndexedDataset,
    record: DatabaseRecord,
    dataset: int,
    sequences: tuple[int, int],
    tokenizer: Tokenizer,
) -> Rows:
    """Return the rows of the chunks of a range of sequences."""
    rows: list[tuple[int, int, int, int]] = []
    with indexed.reading("the documents of a shard"):
        for number in range(*sequences):
            tokens = indexed.get(number)
            length = len(tokens)
            if length and int(tokens[-1]) == record.end:
                length -= 1
            for start in range(0, length, record.chunk_length):
                size = min(record.chunk_length, length - start)
                if not _is_blank(tokenizer, tokens[start : start + size], indexed.prefix):
                    rows.append((dataset, number, start, size))
    return np.array(rows, dtype=np.uint32).reshape(-1, _COLUMNS)


def _is_blank(tokenizer: Tokenizer, tokens: npt.NDArray[np.integer], prefix: str) -> bool:
    try:
        return not tokenizer.decode(tokens.tolist()).strip()
    except ValueError as error:
        raise DataError(
            f"`{prefix}` was prepared with another tokenizer than `{tokenizer.name}`",
            why=str(error),
            hint="give the tokenizer that the text was prepared with",
        ) from error


class ChunkDatabase:
    """Database that was built, open for reading.

    Attributes:
        path: Directory.
        record: Its record.
        chunks: Number of chunks.
    """

    def __init__(self, path: Path, *, verify: bool = False) -> None:
        """Open a database and its datasets.

        Args:
            path: Directory.
            verify: True to compare the shards with their checksums, not only with their sizes.

        Raises:
            DataError: It is no database, half built or damaged; it has no chunk; or a dataset is
                gone or changed.
        """
        store = _store(path)
        self.path, self.record = path, read_record(path / _RECORD, DatabaseRecord, store)
        lists = (self.record.data_paths, self.record.first, self.record.last)
        if any(len(one) != len(self.record.data) for one in lists):
            raise DataError(
                f"`{path / _RECORD}` is damaged",
                why="its lists of datasets have different lengths",
                hint="remove the directory and build it again",
            )
        count = len(self.record.blocks)
        store.require_complete([0] * count)
        self._shards: list[Rows] = []
        for number in range(count):
            shard = store.open(number, verify=verify)
            if shard.ndim != 2 or shard.shape[1] != _COLUMNS or shard.dtype != np.uint32:
                raise store.damaged(number, f"it has {shard.dtype} {list(shard.shape)}")
            self._shards.append(shard)
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        self.chunks = int(self._ends[-1]) if count else 0
        if not self.chunks:
            raise DataError(
                f"the database of chunks `{path}` is empty",
                why="the documents have no token besides the end-of-document token",
                hint="give data with text",
            )
        self.indexed = [self._open(number) for number in range(len(self.record.data))]

    def rows(self, numbers: Int64) -> npt.NDArray[np.int64]:
        """Return the rows of chunks, [N, 4]: dataset, document, first token, number of tokens."""
        found = np.empty((len(numbers), _COLUMNS), dtype=np.int64)
        at = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(at):
            chosen = at == shard
            start = int(self._ends[shard]) - len(self._shards[shard])
            found[chosen] = self._shards[shard][numbers[chosen] - start]
        return found

    def own_tokens(self, first: int, last: int) -> list[npt.NDArray[np.integer]]:
        """Return the tokens of some chunks, without padding.

        Args:
            first: Number of the first chunk.
            last: Number after the last one's.

        Raises:
            DataError: A dataset was cut short since it was opened.
        """
        found = []
        for dataset, document, start, size in self.rows(np.arange(first, last)).tolist():
            indexed = self.indexed[dataset]
            with indexed.reading(f"sequence {document}"):
                found.append(np.array(indexed.get(document, start, size)))
        return found

    def tokens(self, numbers: Int64, chunks: int) -> Int64:
        """Return chunks with the chunks that follow them in the same document, [N, R].

        Args:
            numbers: Numbers of the chunks, [N]; -1: no chunk, only padding.
            chunks: Number of chunks that follow each other; R is this times the chunk length.  The
                end-of-document token fills what a document does not have.

        Raises:
            DataError: A dataset was cut short since it was opened.
        """
        length = self.record.chunk_length
        found = np.full((len(numbers), chunks * length), self.record.end, dtype=np.int64)
        wanted = numbers[:, None] + np.arange(chunks)
        inside = (numbers[:, None] >= 0) & (wanted < self.chunks)
        rows = np.zeros((*wanted.shape, _COLUMNS), dtype=np.int64)
        rows[inside] = self.rows(wanted[inside])
        inside &= (rows[..., :2] == rows[:, :1, :2]).all(axis=-1)
        for place, after in np.argwhere(inside).tolist():
            dataset, document, start, size = rows[place, after].tolist()
            indexed, at = self.indexed[dataset], after * length
            with indexed.reading(f"sequence {document}"):
                found[place, at : at + size] = indexed.get(document, start, size)
        return found

    def _open(self, number: int) -> IndexedDataset:
        record = self.record
        prefix, sequences = record.data_paths[number], (record.first[number], record.last[number])
        again = f"`{COMMAND}` with its new `--data-path` finds it, and computes nothing again"
        try:
            indexed = IndexedDataset(prefix)
        except DataError as error:
            raise DataError(
                f"a dataset of the database of chunks `{self.path}` cannot be opened",
                why=error.what_and_why,
                hint=f"restore it; or, if it was moved: {again}",
            ) from error
        same = 0 <= sequences[0] <= sequences[1] <= len(indexed)
        if not same or content_fingerprint(indexed, sequences) != record.data[number]:
            raise DataError(
                f"`{prefix}` is not the data of the database of chunks `{self.path}`",
                why="the fingerprints of the content differ",
                hint="restore the dataset, or build the database again in another directory",
            )
        return indexed
