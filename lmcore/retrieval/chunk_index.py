"""`ChunkIndex`: the vectors of all chunks of a database, and the search among them.

    index.json          encoder, database and sizes; see `ChunkIndexRecord`
    shard-00000.npy     float32 [n, P]: vectors of the first chunks, in the order of the database
    faiss-KEY.index     the same in a Faiss index, if there is one
    faiss-KEY.json      its settings, size in bytes and CRC-32, written after it

Shapes: N chunks, n chunks of a shard, P channels of a vector, Q queries, K results of a query.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lmcore.base.durable import hidden_path, publish_file, write_atomically
from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.base.lock import LockFile
from lmcore.data.chunks.database import COMMAND
from lmcore.data.chunks.store import ShardStore, begin, file_crc32, read_json, read_record
from lmcore.retrieval.search import Found, load_faiss, nearest

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.data.chunks.database import ChunkDatabase
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.retrieval.chunk_encoder import ChunkEncoder

    Float32 = npt.NDArray[np.float32]

__all__ = [
    "ChunkIndex",
    "ChunkIndexRecord",
    "FaissSettings",
    "build_chunk_index",
    "chunk_texts",
    "encoder_of",
    "fingerprint_of",
]

logger = logging.getLogger(__name__)

_RECORD = "index.json"
_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class ChunkIndexRecord:
    """Content of `index.json`.

    Attributes:
        encoder: Fingerprint of the encoder.
        checkpoint: Absolute path of the encoder, as it was then.
        database: Fingerprint of the database.
        chunks: N.
        size: P.
        inner_product: True if vectors are compared by the inner product; else by the distance.
        shard: Chunks of a shard.
    """

    encoder: str
    checkpoint: str
    database: str
    chunks: int
    size: int
    inner_product: bool
    shard: int
    counts: ClassVar[tuple[str, ...]] = ("chunks", "size", "shard")

    @property
    def rows(self) -> list[int]:
        """Number of chunks of each shard."""
        return [min(self.shard, self.chunks - at) for at in range(0, self.chunks, self.shard)]


@dataclass(frozen=True)
class FaissSettings:
    """Faiss index and its search; all None: exact search without Faiss.

    Attributes:
        factory: String of `faiss.index_factory`, such as `IVF256_HNSW8,PQ32`.
        num_train: Number of chunks, evenly spaced, that train it; None: all.
        probes: Lists of an inverted file that are searched, at most as many as it has.
        depth: Depth of the search in a graph (`efSearch`).
    """

    factory: str | None = None
    num_train: int | None = None
    probes: int | None = None
    depth: int | None = None


_PARTS = {
    "encoder": "encoder",
    "database": "database of chunks",
    "size": "size of the vectors",
    "shard": "number of chunks of a shard",
}


def chunk_texts(database: ChunkDatabase, tokenizer: Tokenizer, first: int, last: int) -> list[str]:
    """Return the texts of some chunks.

    Args:
        database: The database.
        tokenizer: Tokenizer of its datasets.
        first: Number of the first chunk.
        last: Number after the last one's.
    """
    return [tokenizer.decode(one.tolist()) for one in database.own_tokens(first, last)]


def build_chunk_index(
    path: Path,
    database: ChunkDatabase,
    tokenizer: Tokenizer,
    encoder: ChunkEncoder,
    *,
    shard: int,
    batch: int,
    faiss: FaissSettings,
    check: Callable[[], None] | None = None,
) -> ChunkIndex:
    """Write the missing shards of an index, wait for other processes, and return it.

    Args:
        path: Directory of the index; made if it is missing.
        database: The database.
        tokenizer: Tokenizer of its datasets.
        encoder: Encoder of the chunks.
        shard: Chunks of a shard.
        batch: Number of chunks that are encoded together.
        faiss: Settings of a Faiss index.
        check: Function that is called when the directory fits, before anything is computed.

    Raises:
        ConfigError: The directory has an index of another encoder, database or sizes, or other
            files; Faiss refuses its string.
        DataError: A file is damaged.
        MissingPackageError: Faiss is not installed.
    """
    record = ChunkIndexRecord(
        encoder=encoder.fingerprint(),
        checkpoint=str(encoder.checkpoint.resolve()),
        database=database.record.fingerprint,
        chunks=database.chunks,
        size=encoder.size,
        inner_product=encoder.inner_product,
        shard=shard,
    )
    if faiss.factory is not None:
        _new_faiss(record, faiss.factory)  # a wrong string is known before the vectors are computed
    store = _store(path)
    begin(path / _RECORD, record, store, _PARTS, {"database": _other_database})
    if check is not None:
        check()

    def make(number: int) -> Float32:
        first = number * shard
        texts = chunk_texts(database, tokenizer, first, first + record.rows[number])
        return encoder.chunks(texts, batch=batch)

    store.build(record.rows, make, wait=True, unit="chunks")
    index = ChunkIndex(path, faiss, complete=False)
    if faiss.factory is not None:
        index.build_faiss()
    return index


def encoder_of(path: Path) -> str:
    """Return the path of the encoder that built an index.

    Raises:
        DataError: There is no index.
    """
    return read_record(path / _RECORD, ChunkIndexRecord, _store(path)).checkpoint


def fingerprint_of(encoder: ChunkEncoder, database: ChunkDatabase, faiss: FaissSettings) -> str:
    """Return the fingerprint that an index will have; see `ChunkIndex.fingerprint`."""
    key = database.record.fingerprint
    return _fingerprint(encoder.fingerprint(), key, faiss, inner_product=encoder.inner_product)


def _fingerprint(encoder: str, database: str, faiss: FaissSettings, *, inner_product: bool) -> str:
    values = [encoder, database, inner_product]
    values += [dataclasses.asdict(faiss)] if faiss.factory else []
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def _other_database(theirs: ChunkIndexRecord, own: ChunkIndexRecord) -> str:
    """Return how the databases of two records differ, as far as the records say."""
    if theirs.chunks != own.chunks:
        return f"it is of {theirs.chunks:,} chunks, and the database has {own.chunks:,}"
    return (
        f"both have {counted(own.chunks, 'chunk')}, of another tokenizer, length or documents: it "
        f"is of the database {theirs.database[:16]}, this one is {own.database[:16]}"
    )


def _store(path: Path) -> ShardStore:
    return ShardStore(path, "index of chunks", COMMAND)


class ChunkIndex:
    """Index that was built, open for search.

    Attributes:
        path: Directory.
        record: Its record.
        faiss: Settings of its Faiss index.
    """

    def __init__(self, path: Path, faiss: FaissSettings, *, complete: bool = True) -> None:
        """Open an index and compare its shards with their checksums.

        Args:
            path: Directory.
            faiss: Settings of its Faiss index.
            complete: False if the Faiss index may still be missing.

        Raises:
            DataError: It is no index, half built or damaged, or there is no such Faiss index.
        """
        self._stored = store = _store(path)
        self.path, self.faiss = path, faiss
        self.record = record = read_record(path / _RECORD, ChunkIndexRecord, store)
        store.require_complete(record.rows)
        self._shards = []
        for number, rows in enumerate(record.rows):
            vectors = store.open(number)
            if vectors.shape != (rows, record.size) or vectors.dtype != np.float32:
                raise store.damaged(number, f"it has {vectors.dtype} {list(vectors.shape)}")
            self._shards.append(vectors)
        self._faiss: Any = None
        if complete and faiss.factory is not None and not self._has_faiss():
            raise DataError(
                f"the index of chunks `{path}` has no Faiss index `{faiss.factory}`",
                hint=f"run `{COMMAND}` with `--retro-tasks index-build` and this "
                "`--retro-index-str`",
            )

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the results of a search depend on."""
        record = self.record
        return _fingerprint(
            record.encoder, record.database, self.faiss, inner_product=record.inner_product
        )

    def shards(self) -> Iterator[tuple[int, Float32]]:
        """Yield the number of the first chunk, and the vectors, of each shard."""
        for number, vectors in enumerate(self._shards):
            yield number * self.record.shard, vectors

    def require_database(self, database: ChunkDatabase) -> None:
        """Refuse a database that the index was not built of.

        Raises:
            ConfigError: It is another.
        """
        if self.record.database != database.record.fingerprint:
            raise ConfigError(
                f"the index of chunks `{self.path}` was built of another database",
                why=_other_database(
                    self.record,
                    dataclasses.replace(
                        self.record, database=database.record.fingerprint, chunks=database.chunks
                    ),
                ),
                hint=f"remove the index, and run `{COMMAND}` again",
            )

    def search(self, queries_QP: Float32, top: int) -> Found:
        """Return the nearest chunks of each query, the nearest first; -1: there is none.

        Args:
            queries_QP: Vectors of the encoder.
            top: K; fewer if there are fewer chunks.

        Raises:
            DataError: The Faiss index is damaged.
        """
        top = min(top, self.record.chunks)
        if self.faiss.factory is None:
            return nearest(
                self.shards(), queries_QP, top=top, inner_product=self.record.inner_product
            )
        if self._faiss is None:
            self._faiss = self._opened_faiss()
        return Found(*self._faiss.search(np.ascontiguousarray(queries_QP), top))

    def build_faiss(self) -> None:
        """Write the Faiss index, or wait for the process that does.

        Raises:
            ConfigError: Faiss refuses to train it.
        """
        lock = LockFile(self._faiss_path.with_name(f".{self._faiss_path.name}.lock"))
        while not self._has_faiss():
            with lock.held() as own:
                if own and not self._has_faiss():
                    self._write_faiss()
            if not own:
                time.sleep(_WAIT_SECONDS)

    @property
    def _faiss_path(self) -> Path:
        values = [self.faiss.factory, self.faiss.num_train]
        key = hashlib.blake2b(json.dumps(values).encode(), digest_size=4).hexdigest()
        return self.path / f"faiss-{key}.index"

    def _has_faiss(self) -> bool:
        path = self._faiss_path
        try:
            return bool(path.stat().st_size == read_json(path.with_suffix(".json"))["bytes"])
        except (OSError, DataError, KeyError, TypeError, ValueError):
            return False

    def _write_faiss(self) -> None:
        faiss = load_faiss("`--retro-index-str`")
        assert self.faiss.factory is not None
        found, began = _new_faiss(self.record, self.faiss.factory), time.monotonic()
        if not found.is_trained:
            sample = self._training_vectors()
            logger.info("training `%s` on %s chunks", self.faiss.factory, f"{len(sample):,}")
            try:
                found.train(sample)
            except RuntimeError as error:
                raise ConfigError(
                    f"Faiss cannot train `--retro-index-str {self.faiss.factory}`",
                    why=_reason(error),
                    hint="use an index with fewer lists or codes, more `--retro-index-ntrain`, or "
                    "more data",
                ) from error
        for vectors in self._shards:
            found.add(np.ascontiguousarray(vectors))
        path = self._faiss_path
        temporary = hidden_path(path)
        try:
            faiss.write_index(found, str(temporary))
            values: dict[str, Any] = {
                "bytes": temporary.stat().st_size,
                "crc32": file_crc32(temporary),
            }
            publish_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        values |= {"factory": self.faiss.factory, "num_train": self.faiss.num_train}
        write_atomically(path.with_suffix(".json"), json.dumps(values).encode())
        seconds = time.monotonic() - began
        logger.info("wrote the Faiss index `%s` in %.0f s", self.faiss.factory, seconds)

    def _training_vectors(self) -> Float32:
        wanted = min(self.faiss.num_train or self.record.chunks, self.record.chunks)
        chosen = np.linspace(0, self.record.chunks - 1, wanted).astype(np.int64)
        found = np.empty((wanted, self.record.size), dtype=np.float32)
        at = chosen // self.record.shard
        for number, vectors in enumerate(self._shards):
            found[at == number] = vectors[chosen[at == number] - number * self.record.shard]
        return found

    def _opened_faiss(self) -> Any:
        faiss, path = load_faiss("`--retro-index-str`"), self._faiss_path
        if file_crc32(path) != read_json(path.with_suffix(".json"))["crc32"]:
            raise DataError(
                f"`{path}` is damaged",
                why="its checksum differs",
                hint=f"remove it, and run the same `{COMMAND}` again",
            )
        found, space = faiss.read_index(str(path)), faiss.ParameterSpace()
        lists = getattr(faiss.try_extract_index_ivf(found), "nlist", None)
        probes = self.faiss.probes if lists is None else min(self.faiss.probes or 1, lists)
        for name, value in (("nprobe", probes), ("efSearch", self.faiss.depth)):
            if value is not None:
                # An index that is no inverted file, or no graph, does not have it.
                with contextlib.suppress(RuntimeError):
                    space.set_index_parameter(found, name, value)
        return found


def _new_faiss(record: ChunkIndexRecord, factory: str) -> Any:
    faiss = load_faiss("`--retro-index-str`")
    metric = faiss.METRIC_INNER_PRODUCT if record.inner_product else faiss.METRIC_L2
    try:
        return faiss.index_factory(record.size, factory, metric)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"Faiss cannot make `--retro-index-str {factory}` of vectors of {record.size} channels",
            why=_reason(error),
            hint="see the index factory in the documentation of Faiss; `Flat` searches all vectors",
        ) from error


def _reason(error: Exception) -> str:
    """Return the last words of an error of Faiss, which begins with a place in its sources."""
    text = re.sub(r"^.* at \S+:\d+: ", "", str(error).strip().splitlines()[-1])
    return text.rpartition("failed: ")[2]
