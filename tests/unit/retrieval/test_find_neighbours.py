"""Neighbours of samples: equal to a search by hand, also after stops and by two at once."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.chunks.database import ChunkDatabase, Documents, build_database
from lmcore.data.chunks.neighbours import (
    Neighbours,
    database_path,
    neighbours_path,
    open_neighbours,
)
from lmcore.data.chunks.store import ShardStore
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import build_tokenizer
from lmcore.retrieval.chunk_index import ChunkIndex, FaissSettings, build_chunk_index
from lmcore.retrieval.find_neighbours import NeighbourSettings, SourceQueries, find_neighbours

END, LENGTH, SEQUENCE = 256, 8, 32
SIZE = 12
EXACT = FaissSettings()
SETTINGS = NeighbourSettings(num_queried=9, num_neighbors=4, block=20, batch=16)


class Hashed:
    """Encoder whose vectors are drawn from a seed and the text."""

    def __init__(self, seed: int = 1, *, inner_product: bool = False) -> None:
        self.seed, self.inner_product, self.size = seed, inner_product, SIZE
        self.checkpoint = Path("hashed")
        self.calls = 0

    def fingerprint(self) -> str:
        return f"hashed {self.seed} {self.inner_product}"

    def chunks(self, texts: Sequence[str], *, batch: int) -> Any:
        assert batch == 16
        self.calls += 1
        return np.stack([self.vector(text) for text in texts])

    queries = chunks

    def vector(self, text: str) -> Any:
        seed = hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest()
        drawn = np.random.default_rng(int.from_bytes(seed)).standard_normal(SIZE)
        return drawn.astype(np.float32)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Has 30 documents of random letters, of 2 to 60 tokens."""
    prefix = tmp_path_factory.mktemp("data") / "set"
    draw = np.random.default_rng(5)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(30):
            length = int(draw.integers(2, 60))
            writer.add_document([*draw.integers(97, 123, length).tolist(), END])
    return IndexedDataset(prefix)


class Project:
    """Project directory with what its steps need."""

    def __init__(self, path: Path, indexed: IndexedDataset, encoder: Hashed) -> None:
        self.path, self.indexed, self.encoder = path, indexed, encoder
        self.tokenizer = build_tokenizer("ByteTokenizer")

    def build(self, faiss: FaissSettings = EXACT) -> tuple[ChunkDatabase, ChunkIndex]:
        database = build_database(
            database_path(self.path),
            [Documents(self.indexed, (0, 25))],
            self.tokenizer,
            chunk_length=LENGTH,
            block=4,
        )
        index = build_chunk_index(
            self.path / "index",
            database,
            self.tokenizer,
            self.encoder,
            shard=11,
            batch=16,
            faiss=faiss,
        )
        return database, index

    def samples(self, documents: tuple[int, int] = (0, 25), count: int = 23) -> GPTDataset:
        return GPTDataset(
            self.indexed,
            document_range=documents,
            num_samples=count,
            sequence_length=SEQUENCE,
            seed=3,
            cache_dir=self.path.parent / "cache",
        )

    def find(
        self,
        part: str = "train",
        faiss: FaissSettings = EXACT,
        settings: NeighbourSettings = SETTINGS,
        **changes: Any,
    ) -> Neighbours:
        database, index = self.build(faiss)
        samples = self.samples(**changes)
        queries = SourceQueries(part, "set", self.indexed, samples, len(samples), SEQUENCE)
        return find_neighbours(
            self.path, queries, database, index, self.encoder, self.tokenizer, settings
        )

    def by_hand(self, samples: GPTDataset, settings: NeighbourSettings = SETTINGS) -> Any:
        """Return the neighbours, [n, L, K], by a product in float64 and loops."""
        chunks = [
            (document, start, bytes(self.indexed.get(document)[:-1].tolist()[start:][:LENGTH]))
            for document in range(25)
            for start in range(0, len(self.indexed.get(document)) - 1, LENGTH)
        ]
        vectors = np.stack([self.encoder.vector(one[2].decode()) for one in chunks])
        found = []
        for sample in range(len(samples)):
            tokens, documents = samples[sample][:-1].reshape(-1, LENGTH), samples.documents(sample)
            for chunk in tokens:
                text = bytes(one for one in chunk.tolist() if one != END).decode()
                query = self.encoder.vector(text).astype(np.float64)
                scores = vectors.astype(np.float64) @ query
                if not self.encoder.inner_product:
                    scores = -np.square(vectors.astype(np.float64) - query).sum(axis=1)
                nearest = np.argsort(-scores)[: settings.num_queried].tolist()
                kept = [one for one in nearest if chunks[one][0] not in documents]
                kept = kept[: settings.num_neighbors]
                found.append(kept + [-1] * (settings.num_neighbors - len(kept)))
        return np.array(found).reshape(len(samples), SEQUENCE // LENGTH, -1)


@pytest.fixture
def project(tmp_path: Path, indexed: IndexedDataset) -> Project:
    return Project(tmp_path / "project", indexed, Hashed())


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()
    }


def all_of(found: Neighbours) -> Any:
    return np.stack([found.chunks(sample) for sample in range(found.num_samples)])


@pytest.mark.parametrize("inner_product", [False, True])
def test_the_nearest_chunks_of_other_documents(
    tmp_path: Path, indexed: IndexedDataset, inner_product: bool
) -> None:
    """They are found as by hand, nearest first; no chunk is of a document of its sample."""
    project = Project(tmp_path / "project", indexed, Hashed(inner_product=inner_product))
    found, samples = project.find(), project.samples()
    every = all_of(found)
    np.testing.assert_array_equal(every, project.by_hand(samples))
    for sample in range(len(samples)):
        chosen = every[sample][every[sample] >= 0]
        documents = found.database.rows(chosen.astype(np.int64))[:, 1]
        assert not set(documents.tolist()) & set(samples.documents(sample).tolist())
    assert (every[..., 0] >= 0).all()


def test_faiss_finds_the_same(project: Project, tmp_path: Path, indexed: IndexedDataset) -> None:
    """A flat index has the same neighbours; an exact search is then another index."""
    pytest.importorskip("faiss")
    exact = all_of(project.find())
    other = Project(tmp_path / "faiss", indexed, Hashed())
    flat = FaissSettings("Flat")
    np.testing.assert_array_equal(all_of(other.find(faiss=flat)), exact)
    with pytest.raises(ConfigError, match="another index"):
        other.find()


def test_a_trained_faiss_index(project: Project) -> None:
    """It is trained on a sample and finds most of the same; with all its lists, all of them."""
    pytest.importorskip("faiss")
    exact, samples = project.find(), project.samples()
    database, index = project.build(FaissSettings("IVF4,Flat", num_train=70, probes=65536))
    queries = np.stack([project.encoder.vector(f"{number}") for number in range(9)])
    _, plain = project.build()
    np.testing.assert_array_equal(index.search(queries, 5).blocks, plain.search(queries, 5).blocks)
    one_list = FaissSettings("IVF4,Flat", num_train=70, probes=1)
    fewer = ChunkIndex(index.path, one_list)
    assert not np.array_equal(fewer.search(queries, 5).blocks, plain.search(queries, 5).blocks)
    assert len(exact.chunks(0)) == len(samples[0]) // LENGTH
    path = next(index.path.glob("faiss-*.index"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="checksum differs"):
        ChunkIndex(index.path, one_list).search(queries, 5)
    with pytest.raises(DataError, match="no Faiss index `IVF2,Flat`"):
        ChunkIndex(index.path, FaissSettings("IVF2,Flat"))
    assert database.chunks == index.record.chunks


@pytest.mark.parametrize(
    "factory, words", [("IVF999,Flat", "cannot train"), ("Flut", "cannot make")]
)
def test_a_faiss_index_that_cannot_be(project: Project, factory: str, words: str) -> None:
    """A wrong string, and too little data to train, are refused with Faiss's reason."""
    pytest.importorskip("faiss")
    with pytest.raises(ConfigError, match=words) as caught:
        project.build(FaissSettings(factory))
    assert caught.value.why
    assert "/" not in caught.value.why


def test_validation_samples(project: Project) -> None:
    """Documents that are not in the database have neighbours like any text."""
    found = project.find("valid", documents=(25, 30), count=4)
    assert found.record.part == "valid"
    samples = project.samples((25, 30), 4)
    np.testing.assert_array_equal(all_of(found), project.by_hand(samples))
    again = open_neighbours(project.path, "valid", description=samples.order, verify=True)
    assert again.num_samples == 4
    assert again.tokens(3, 2, 2).shape == (SEQUENCE // LENGTH, 2, 2 * LENGTH)


def stop_before(patch: pytest.MonkeyPatch, folder: str, shard: int) -> None:
    """Make a process end before it writes a shard of a folder."""
    write = ShardStore.write

    def stopping(store: ShardStore, number: int, array: Any) -> None:
        if folder in store.path.parts and number == shard:
            raise KeyboardInterrupt
        write(store, number, array)

    patch.setattr(ShardStore, "write", stopping)


def test_stopped_and_continued(
    project: Project, tmp_path: Path, indexed: IndexedDataset, caplog: Any
) -> None:
    """A project that was stopped in each step ends with the same files, byte for byte."""
    caplog.set_level(logging.INFO)
    project.find()
    whole = files(project.path)
    stopped = Project(tmp_path / "stopped", indexed, Hashed())
    for folder, shard in (("database", 2), ("index", 3), ("neighbours", 1)):
        with pytest.MonkeyPatch.context() as patch:
            stop_before(patch, folder, shard)
            with pytest.raises(KeyboardInterrupt):
                stopped.find()
        assert set(files(stopped.path)) < set(whole)
    assert any("neighbours" in name for name in files(stopped.path))
    stopped.find()
    assert files(stopped.path) == whole
    before = stopped.encoder.calls
    stopped.find()
    assert stopped.encoder.calls == before
    assert "train samples/s" in caplog.text


def test_two_at_once(project: Project, tmp_path: Path, indexed: IndexedDataset) -> None:
    """Two that work on one project at once end with the files of one."""
    project.find()
    both = [Project(tmp_path / "both", indexed, Hashed()) for _ in range(2)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=one.find) for one in both]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert files(tmp_path / "both") == files(project.path)


def test_more_samples(project: Project) -> None:
    """A longer run of the same order adds what is missing; a shorter one computes nothing."""
    short = all_of(project.find(count=7))
    samples = project.samples(count=16)
    path = neighbours_path(project.path, "train", samples.order)
    first = (path / "shard-00000.npy").stat().st_mtime_ns
    long = all_of(project.find(count=16))
    np.testing.assert_array_equal(long, project.by_hand(samples))
    np.testing.assert_array_equal(long[:7], short)
    assert (path / "shard-00000.npy").stat().st_mtime_ns == first
    before = project.encoder.calls
    assert project.find(count=7).num_samples == 16
    assert project.encoder.calls == before


def test_what_does_not_fit(project: Project) -> None:
    """Another encoder, other numbers, and chunks that divide no sample are refused."""
    project.find()
    database, index = project.build()
    samples = project.samples()
    queries = SourceQueries("train", "set", project.indexed, samples, len(samples), SEQUENCE)
    arguments = (project.tokenizer, SETTINGS)
    with pytest.raises(ConfigError, match="built by another encoder"):
        find_neighbours(project.path, queries, database, index, Hashed(2), *arguments)
    with pytest.raises(ConfigError, match="an index of chunks with another encoder"):
        Project(project.path, project.indexed, Hashed(2)).build()
    with pytest.raises(ConfigError, match="another number of neighbours that are looked for"):
        project.find(settings=replace(SETTINGS, num_queried=10))
    with pytest.raises(ConfigError, match="another number of neighbours"):
        project.find(settings=replace(SETTINGS, num_neighbors=2))
    with pytest.raises(ConfigError, match="do not divide samples of 36"):
        find_neighbours(
            *(project.path, replace(queries, seq_length=36), database, index, project.encoder),
            *arguments,
        )


def test_an_index_of_another_database(project: Project, tmp_path: Path) -> None:
    """The number of chunks is named where it differs, when it is searched and when it is built."""
    _, index = project.build()
    documents, tokenizer = [Documents(project.indexed, (0, 9))], project.tokenizer
    other = build_database(tmp_path / "other", documents, tokenizer, chunk_length=LENGTH, block=4)
    why = f"it is of {index.record.chunks:,} chunks, and the database has {other.chunks:,}"
    with pytest.raises(ConfigError, match="was built of another database") as caught:
        index.require_database(other)
    assert caught.value.why == why
    with pytest.raises(ConfigError, match="another database of chunks") as caught:
        build_chunk_index(
            *(project.path / "index", other, tokenizer, project.encoder),
            shard=11,
            batch=16,
            faiss=EXACT,
        )
    assert caught.value.why == why


def test_more_than_there_are(project: Project) -> None:
    """A search for more neighbours than chunks finds them all; missing ones are -1."""
    few = NeighbourSettings(num_queried=1000, num_neighbors=500, block=20, batch=16)
    found = project.find(settings=few, count=3)
    every, samples = all_of(found), project.samples(count=3)
    for sample in range(3):
        rows = found.database.rows(np.arange(found.database.chunks))
        own = np.isin(rows[:, 1], samples.documents(sample)).sum()
        assert ((every[sample] >= 0).sum(axis=1) == found.database.chunks - own).all()
