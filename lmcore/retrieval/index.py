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

import dataclasses
import io
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcore.base.bounded_file import UnreadableFileError, read_bounded_file
from lmcore.base.crc32 import crc32
from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.base.lock import LockFile
from lmcore.data.dataset.ict import ICTDataset, ICTSettings
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.indexed.statistics import content_fingerprint

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.retrieval.encoder import TextEncoder

__all__ = ["BlockIndex", "BlockText", "IndexRecord", "build_index"]

logger = logging.getLogger(__name__)

_VERSION = 1
_RECORD, _BLOCKS = "index.json", "blocks.npy"
_SMALL = 1 << 20
"""Most bytes of a JSON file."""
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

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.blocks // self.shard)

    def shard_size(self, number: int) -> int:
        """Return the number of blocks of a shard."""
        return min(self.shard, self.blocks - number * self.shard)


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
    _begin(output, record, source.rows)
    missing = [number for number in range(record.shards) if not _is_complete(output, number)]
    if done := record.shards - len(missing):
        logger.info("%s of %s are there already", counted(done, "shard"), record.shards)
    began, built = time.perf_counter(), 0
    for number in missing:
        with LockFile(output / f".shard-{number:05d}.lock").held() as own:
            if not own or _is_complete(output, number):
                continue
            first = number * shard
            rows = [source.tokens(first + place) for place in range(record.shard_size(number))]
            _write_shard(output, number, encoder.blocks(rows, batch=batch))
            built += len(rows)
        seconds = time.perf_counter() - began
        logger.info(
            "shard %d of %d, %d blocks/s", number + 1, record.shards, round(built / seconds)
        )
    return record


def _begin(output: Path, record: IndexRecord, rows: npt.NDArray[np.int64]) -> None:
    """Write the record, or compare it with the one that is there."""
    path = output / _RECORD
    if not path.exists():
        if output.exists() and any(one.name[0] != "." for one in output.iterdir()):
            raise ConfigError(
                f"`{output}` is not empty, and no index", hint="give a directory of its own"
            )
        output.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, rows)
        write_atomically(output / _BLOCKS, buffer.getvalue())
        values = {"version": _VERSION, **dataclasses.asdict(record)}
        write_atomically(path, json.dumps(values, indent=2).encode())
        return
    _require_same(output, _read_record(output), record)


_PARTS = {
    "encoder": "encoder",
    "data": "data",
    "seq_length": "length of the blocks",
    "size": "size of the vectors",
    "shard": "number of blocks of a shard",
}


def _require_same(output: Path, found: IndexRecord, record: IndexRecord) -> None:
    for name, words in _PARTS.items():
        theirs, own = getattr(found, name), getattr(record, name)
        if theirs != own:
            raise ConfigError(
                f"`{output}` is an index with another {words}",
                why=f"it has {str(theirs)[:16]}, and this one would have {str(own)[:16]}",
                hint="give another directory, or remove this one",
            )


def _shard_path(output: Path, number: int) -> Path:
    return output / f"shard-{number:05d}.npy"


def _write_shard(output: Path, number: int, vectors: npt.NDArray[np.float32]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, vectors)
    content, path = buffer.getvalue(), _shard_path(output, number)
    write_atomically(path, content)
    checksum = {"bytes": len(content), "crc32": crc32(content)}
    write_atomically(path.with_suffix(".json"), json.dumps(checksum).encode())


def _is_complete(output: Path, number: int) -> bool:
    """Return True if a shard is there with its checksum, which is not compared."""
    path = _shard_path(output, number)
    try:
        return bool(path.stat().st_size == _read_json(path.with_suffix(".json"))["bytes"])
    except (OSError, KeyError, TypeError, ValueError):
        return False


def _read_json(path: Path) -> Any:
    return json.loads(read_bounded_file(path, _SMALL))


def _read_record(output: Path) -> IndexRecord:
    """Return the record of an index, whose author is not known.

    Raises:
        DataError: It is missing or malformed.
    """
    path = output / _RECORD
    if not path.is_file():
        raise DataError(
            f"`{output}` is no index",
            why=f"it has no `{_RECORD}`",
            hint="`lmcore index build` makes one",
        )
    problem = ""
    values: Any = None
    try:
        values = _read_json(path)
    except (OSError, UnreadableFileError, ValueError) as error:
        problem = str(error)
    fields = {one.name: str(one.type) for one in dataclasses.fields(IndexRecord)}
    if isinstance(values, dict) and values.get("version") not in {None, _VERSION}:
        problem = f"its version is {values['version']!s:.20}, and this lmcore reads {_VERSION}"
    elif not problem and (not isinstance(values, dict) or values.keys() != {"version", *fields}):
        problem = "it has not the keys of an index"
    if not problem:
        values = {name: values[name] for name in fields}
        wrong = [name for name, kind in fields.items() if type(values[name]).__name__ != kind]
        counts = ("seq_length", "blocks", "size", "shard")
        wrong += [name for name in counts if name not in wrong and values[name] < 1]
        problem = f"`{wrong[0]}` is `{values[wrong[0]]!s:.40}`" if wrong else ""
    if problem:
        raise DataError(
            f"`{path}` is damaged", why=problem, hint="remove the directory and build it again"
        )
    return IndexRecord(**values)


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
        self.path, self.record = path, _read_record(path)
        missing = [number for number in range(self.record.shards) if not _is_complete(path, number)]
        if missing:
            raise DataError(
                f"the index `{path}` is half built",
                why=f"{counted(len(missing), 'shard')} of {self.record.shards} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                hint="run the same `lmcore index build` again: it builds the missing ones",
            )
        self._shards = [self._open(number) for number in range(self.record.shards)]

    def shards(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the number of the first block, and the vectors, of each shard."""
        for number, vectors in enumerate(self._shards):
            yield number * self.record.shard, vectors

    def require_encoder(self, encoder: TextEncoder) -> None:
        """Refuse an encoder that did not build the index.

        Raises:
            ConfigError: It is another.
        """
        if (found := encoder.fingerprint()) != self.record.encoder:
            raise ConfigError(
                f"the index `{self.path}` was built by another encoder",
                why=f"it has the fingerprint {self.record.encoder[:16]} of "
                f"`{self.record.checkpoint}`; `{encoder.checkpoint}` has {found[:16]}",
                hint="give the checkpoint that it was built with, or build an index with this one",
            )

    def source(self, encoder: TextEncoder) -> BlockSource:
        """Return the blocks of the index, whose dataset is where it was.

        Raises:
            ConfigError, DataError: The dataset is gone, or another now.
        """
        record = self.record
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

    def _open(self, number: int) -> npt.NDArray[np.float32]:
        path, size = _shard_path(self.path, number), self.record.shard_size(number)
        problem = ""
        vectors: npt.NDArray[np.float32] | None = None
        try:
            wanted = _read_json(path.with_suffix(".json"))["crc32"]
            vectors = np.load(path, mmap_mode="r", allow_pickle=False)
            if _file_crc32(path) != wanted:
                problem = "its checksum differs"
            elif vectors.shape != (size, self.record.size) or vectors.dtype != np.float32:
                problem = f"it has {vectors.dtype} {list(vectors.shape)}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
        if problem or vectors is None:
            raise DataError(
                f"`{path}` is damaged",
                why=problem,
                hint="remove it, and run the same `lmcore index build` again",
            )
        return vectors


def _file_crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(_SMALL):
            found = crc32(part, found)
    return found
