"""`BlockIndex`: the vectors of all blocks of a dataset, in shards on disk.

    index.json          encoder, data and sizes; see `IndexRecord`
    blocks.npy          int64 [N, 4]: first sentence, the one after the last, document, number
    shard-00000.npy     float32 [n, P]: vectors of the first blocks, in the order of `blocks.npy`
    shard-00000.json    its size in bytes and CRC-32, written after it

Shards are built one by one: a build that was stopped continues with the missing ones, and several
processes may build one index, each the shards that no other one builds.
Shapes: N blocks, n blocks of a shard, P channels of a vector.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, DataError
from lmcore.data.chunks.store import ShardStore, begin, read_record
from lmcore.data.dataset.ict import ICTDataset, ICTSettings
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.indexed.statistics import content_fingerprint

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.retrieval.encoder import TextEncoder

__all__ = ["BlockIndex", "BlockText", "IndexRecord", "build_index"]

_RECORD, _BLOCKS = "index.json", "blocks.npy"
_SEED = 1
"""Seed of the order in which blocks are drawn, which is sorted afterwards."""


@dataclass(frozen=True)
class IndexRecord:
    """Content of `index.json`: two indices with equal records are built of the same parts.

    Attributes:
        encoder: Fingerprint of the encoders and their tokenizer.
        checkpoint: Absolute path of the checkpoint, as it was then.
        data: Fingerprint of the dataset, the titles and the division into blocks.
        data_path: Absolute prefix of the dataset.
        titles_data_path: Absolute prefix of the titles; empty: there are none.
        seq_length: Most tokens of a block.
        one_sentence: True if documents of one sentence are included.
        blocks: N.
        size: P.
        shard: Blocks of a shard.
    """

    encoder: str
    checkpoint: str
    data: str
    data_path: str
    titles_data_path: str
    seq_length: int
    one_sentence: bool
    blocks: int
    size: int
    shard: int
    counts: ClassVar[tuple[str, ...]] = ("seq_length", "blocks", "size", "shard")

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.blocks // self.shard)

    def shard_size(self, number: int) -> int:
        """Return the number of blocks of a shard."""
        return min(self.shard, self.blocks - number * self.shard)

    @property
    def rows(self) -> list[int]:
        """Number of blocks of each shard."""
        return [self.shard_size(number) for number in range(self.shards)]


@dataclass(frozen=True)
class BlockText:
    """Block as text.

    Attributes:
        document: Number of its document in the dataset.
        title: Title of the document; empty: there is none.
        text: Text of the block, decoded from its tokens.
    """

    document: int
    title: str
    text: str


class BlockSource:
    """Blocks of a dataset in the order of its sentences.

    Attributes:
        rows: int64 [N, 4]; see `blocks.npy`.
        key: Fingerprint of data, titles and division.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        data_path: str,
        titles_data_path: str | None,
        seq_length: int,
        *,
        one_sentence: bool,
    ) -> None:
        """Divide the dataset into blocks.

        Raises:
            ConfigError: The dataset was prepared with another tokenizer.
            DataError: The dataset is damaged, or makes no block.
        """
        self._tokenizer = encoder.tokenizer
        _require_tokenizer(encoder, data_path)
        self._indexed = IndexedDataset(data_path)
        self._titles = None
        titles_key = ""
        if titles_data_path is not None:
            _require_tokenizer(encoder, titles_data_path)
            self._titles = IndexedDataset(titles_data_path)
            titles_key = content_fingerprint(self._titles, (0, len(self._titles)))
        self._dataset = ICTDataset(
            self._indexed,
            self._titles,
            encoder.vocabulary,
            ICTSettings(seq_length, _SEED, one_sentence=one_sentence),
            document_range=(0, self._indexed.document_count),
            num_samples=None,
            name="index",
        )
        rows = np.asarray(self._dataset.rows, dtype=np.int64)
        self._order = np.lexsort((rows[:, 0], rows[:, 2]))
        self.rows = rows[self._order]
        self.key = f"{self._dataset.order}{titles_key}"

    def tokens(self, number: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a block with its title and special tokens, without padding."""
        tokens, mask = self._dataset.block(int(self._order[number]))
        return tokens[: int(mask.sum())]

    def text(self, number: int) -> BlockText:
        """Return a block as text."""
        first, last, document, _ = (int(one) for one in self.rows[number])
        ids = [int(one) for sentence in self._dataset.sentences(first, last) for one in sentence]
        title = ""
        if self._titles is not None:
            title = self._tokenizer.decode(self._titles.get(document).tolist())
        return BlockText(document, title, self._tokenizer.decode(ids))


def _require_tokenizer(encoder: TextEncoder, prefix: str) -> None:
    metadata = read_metadata(prefix)
    if metadata is not None and metadata.fingerprint != encoder.tokenizer.fingerprint():
        raise ConfigError(
            f"`{prefix}` was prepared with another tokenizer than the model's",
            why=f"it records {metadata.tokenizer.get('tokenizer_type')} of {metadata.vocab_size} "
            f"tokens with the fingerprint {metadata.fingerprint[:16]}, the model has "
            f"{encoder.tokenizer.name} of {encoder.tokenizer.vocab_size} with "
            f"{encoder.tokenizer.fingerprint()[:16]}",
            hint="prepare the text again with the model's tokenizer",
        )


def build_index(
    encoder: TextEncoder,
    output: Path,
    *,
    data_path: str,
    titles_data_path: str | None,
    seq_length: int | None,
    one_sentence: bool,
    batch: int,
    shard: int,
) -> IndexRecord:
    """Build the missing shards of an index, except the shards that other processes build.

    Args:
        encoder: Encoders.
        output: Directory of the index; made if it is missing.
        data_path: Prefix of a dataset of sentences.
        titles_data_path: Prefix of a dataset with a title for each document; None: no titles.
        seq_length: Most tokens of a block; None: the model's positions.
        one_sentence: True to include documents of one sentence.
        batch: Number of blocks that are computed together.
        shard: Blocks of a shard.

    Raises:
        ConfigError: The directory has an index of other parts, or is no index; the length does not
            fit the model.
        DataError: The dataset is damaged, or makes no block.
    """
    length = seq_length or encoder.longest
    if length > encoder.longest:
        raise ConfigError(
            f"`--seq-length {length}` is longer than the model's {encoder.longest} positions",
            hint=f"use `--seq-length {encoder.longest}`, or leave it out",
        )
    source = BlockSource(encoder, data_path, titles_data_path, length, one_sentence=one_sentence)
    record = IndexRecord(
        encoder=encoder.fingerprint(),
        checkpoint=str(encoder.checkpoint.resolve()),
        data=source.key,
        data_path=str(Path(data_path).resolve()),
        titles_data_path="" if titles_data_path is None else str(Path(titles_data_path).resolve()),
        seq_length=length,
        one_sentence=one_sentence,
        blocks=len(source.rows),
        size=encoder.size,
        shard=shard,
    )
    store = _store(output)
    begin(output / _RECORD, record, store, _PARTS)
    blocks, buffer = output / _BLOCKS, io.BytesIO()
    np.save(buffer, source.rows)
    if not blocks.exists() or blocks.read_bytes() != buffer.getvalue():
        write_atomically(blocks, buffer.getvalue())

    def make(number: int) -> npt.NDArray[np.float32]:
        first = number * shard
        rows = [source.tokens(first + place) for place in range(record.shard_size(number))]
        return encoder.blocks(rows, batch=batch)

    store.build(record.rows, make, wait=False, unit="blocks")
    return record


_PARTS = {
    "encoder": "encoder",
    "seq_length": "length of the blocks",
    "one_sentence": "choice by `--use-one-sent-docs`",
    "data": "dataset, or other titles",
    "size": "size of the vectors",
    "shard": "number of blocks of a shard",
}


def _store(path: Path) -> ShardStore:
    return ShardStore(path, "index", "lmcore index build")


class BlockIndex:
    """Index that was built, open for reading.

    Attributes:
        path: Directory.
        record: Its record.
    """

    def __init__(self, path: Path) -> None:
        """Open an index and compare its shards with their checksums.

        Raises:
            DataError: It is no index, half built or damaged.
        """
        store = _store(path)
        self.path, self.record = path, read_record(path / _RECORD, IndexRecord, store)
        store.require_complete(self.record.rows)
        self._shards = [self._open(store, number) for number in range(self.record.shards)]

    def shards(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the number of the first block, and the vectors, of each shard."""
        for number, vectors in enumerate(self._shards):
            yield number * self.record.shard, vectors

    def source(self, encoder: TextEncoder) -> BlockSource:
        """Return the blocks of the index, whose dataset is where it was.

        Raises:
            ConfigError, DataError: The dataset is gone, or another now.
        """
        record = self.record
        for prefix in filter(None, (record.data_path, record.titles_data_path)):
            if not Path(f"{prefix}.idx").exists():
                raise DataError(
                    f"the data of the index `{self.path}` is gone",
                    why=f"no such file: `{prefix}.idx`",
                    hint="if it was moved, run the same `lmcore index build` with the new paths: "
                    "it computes nothing again",
                )
        source = BlockSource(
            encoder,
            record.data_path,
            record.titles_data_path or None,
            record.seq_length,
            one_sentence=record.one_sentence,
        )
        if source.key != record.data:
            raise DataError(
                f"`{record.data_path}` is not the data that `{self.path}` was built of",
                why="the fingerprints of the content differ",
                hint="restore the dataset and its titles, or build the index again",
            )
        return source

    def _open(self, store: ShardStore, number: int) -> npt.NDArray[np.float32]:
        vectors = store.open(number)
        wanted = (self.record.shard_size(number), self.record.size)
        if vectors.shape != wanted or vectors.dtype != np.float32:
            raise store.damaged(number, f"it has {vectors.dtype} {list(vectors.shape)}")
        return vectors
