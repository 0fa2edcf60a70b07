"""A database of chunks: what is cut, what is read back, and what is refused."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.base.lock import LockFile
from lmcore.data.chunks.database import ChunkDatabase, Documents, build_database
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import build_tokenizer

END, LENGTH = 256, 4
TEXTS = [
    ["abcdefghij", "kl", "mnop", ""],
    ["    qrst    ", "uvwxyz", "    "],
]
"""Documents of two datasets; the chunks of four blanks have no text."""

CHUNKS = [
    *[(0, 0, 0, 4), (0, 0, 4, 4), (0, 0, 8, 2), (0, 1, 0, 2), (0, 2, 0, 4)],
    *[(1, 0, 4, 4), (1, 1, 0, 4), (1, 1, 4, 2)],
]

Build = Callable[..., ChunkDatabase]


def write(prefix: Path, texts: Sequence[str]) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for text in texts:
            writer.add_document([*text.encode(), END])
    return IndexedDataset(prefix)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a database of `TEXTS`, or of other ones."""

    def make(texts: Sequence[Sequence[str]] = TEXTS, name: str = "db", **changes: Any) -> Any:
        sets = [write(tmp_path / f"set{n}", one) for n, one in enumerate(texts)]
        documents = [Documents(one, (0, len(one))) for one in sets]
        settings = {"chunk_length": LENGTH, "block": 2, **changes}
        tokenizer = build_tokenizer("ByteTokenizer")
        return build_database(tmp_path / name, documents, tokenizer, **settings)

    return make


def test_chunks_of_documents(build: Build) -> None:
    """Chunks stay within documents, without the end token; blank ones are left out."""
    database = build()
    assert database.chunks == len(CHUNKS)
    np.testing.assert_array_equal(database.rows(np.arange(len(CHUNKS))), CHUNKS)
    np.testing.assert_array_equal(
        database.rows(np.array([7, 0, 5])), [CHUNKS[n] for n in (7, 0, 5)]
    )
    texts = [bytes(one.tolist()).decode() for one in database.own_tokens(0, database.chunks)]
    assert texts == ["abcd", "efgh", "ij", "kl", "mnop", "qrst", "uvwx", "yz"]


def test_the_chunks_that_follow(build: Build) -> None:
    """They are of the same document; the end token fills what it does not have."""
    found = build().tokens(np.array([0, 1, 2, 4, 7, -1]), 2)
    spelled = ["".join("." if one == END else chr(one) for one in row) for row in found]
    assert spelled == ["abcdefgh", "efghij..", "ij......", "mnop....", "yz......", "........"]
    assert found.dtype == np.int64


@pytest.mark.parametrize("block", [1, 3, 100])
def test_blocks_do_not_matter(build: Build, block: int) -> None:
    """The chunks and their fingerprint are the same."""
    first, second = build(), build(name="other", block=block)
    every = np.arange(first.chunks)
    np.testing.assert_array_equal(first.rows(every), second.rows(every))
    assert first.record.fingerprint == second.record.fingerprint


def test_a_part_of_the_documents(tmp_path: Path) -> None:
    """Only the documents of the range are cut; they keep their numbers in the dataset."""
    indexed = write(tmp_path / "set", TEXTS[0])
    tokenizer = build_tokenizer("ByteTokenizer")
    documents = [Documents(indexed, (1, 3))]
    database = build_database(tmp_path / "db", documents, tokenizer, chunk_length=LENGTH, block=2)
    np.testing.assert_array_equal(database.rows(np.arange(2)), [(0, 1, 0, 2), (0, 2, 0, 4)])


def test_a_stopped_build_goes_on(build: Build, caplog: Any) -> None:
    """A half built database is refused; the missing shards are written, byte for byte."""
    caplog.set_level(logging.INFO)
    path = build().path
    files = {one.name: one.read_bytes() for one in path.iterdir()}
    for half in ("shard-00001.npy", "shard-00002.json"):
        (path / half).unlink()
    untouched = (path / "shard-00000.npy").stat().st_mtime_ns
    with pytest.raises(DataError, match=r"half built[\s\S]*2 shards of 4 are missing"):
        ChunkDatabase(path)
    caplog.clear()
    build()
    assert {one.name: one.read_bytes() for one in path.iterdir()} == files
    assert (path / "shard-00000.npy").stat().st_mtime_ns == untouched
    assert "database of chunks: found 2 of 4 shards" in caplog.text
    assert "shard 2 of 4" in caplog.text
    assert "left" in caplog.text


def test_a_shard_of_another_process_is_waited_for(build: Build) -> None:
    """A build ends when the other process has written its shard, or has given it up."""
    path = build().path
    shard = path / "shard-00001.npy"
    content = shard.read_bytes()
    shard.unlink()
    found: list[ChunkDatabase] = []
    thread = threading.Thread(target=lambda: found.append(build()))
    with LockFile(path / ".shard-00001.lock").held() as own:
        assert own
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not shard.exists()
    thread.join(60)
    assert len(found) == 1
    assert shard.read_bytes() == content


def test_a_database_of_other_parts(build: Build, tmp_path: Path) -> None:
    """Another length, other data and another tokenizer are refused, by name."""
    build()
    for changes, words in (
        ({"chunk_length": 8}, "another length of the chunks"),
        ({"block": 9}, "another number of documents of a shard"),
        (
            {"texts": [["other"], TEXTS[1]]},
            r"another data[\s\S]*the documents of `\S*/set0` are not what they were",
        ),
        ({"texts": TEXTS[:1]}, r"another data[\s\S]*it is of `\S*/set0`, `\S*/set1`, and this one"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(**changes)
    write(tmp_path / "set0", TEXTS[0])
    documents = [Documents(IndexedDataset(tmp_path / f"set{n}"), (0, 2)) for n in range(2)]
    with pytest.raises(ConfigError, match="another tokenizer"):
        build_database(
            tmp_path / "db",
            documents,
            build_tokenizer("NullTokenizer", vocab_size=256),
            chunk_length=LENGTH,
            block=2,
        )


def test_moved_data(build: Build, tmp_path: Path) -> None:
    """A dataset that was moved is found after a build that names its new place."""
    path = build().path
    for ending in ("idx", "bin"):
        (tmp_path / f"set0.{ending}").rename(tmp_path / f"moved.{ending}")
    with pytest.raises(DataError, match=r"cannot be opened[\s\S]*--data-path"):
        ChunkDatabase(path)
    before = (path / "shard-00000.npy").stat().st_mtime_ns
    sets = [IndexedDataset(tmp_path / name) for name in ("moved", "set1")]
    build_database(
        path,
        [Documents(one, (0, len(one))) for one in sets],
        build_tokenizer("ByteTokenizer"),
        chunk_length=LENGTH,
        block=2,
    )
    assert ChunkDatabase(path).chunks == len(CHUNKS)
    assert (path / "shard-00000.npy").stat().st_mtime_ns == before


def test_damage(build: Build, tmp_path: Path) -> None:
    """Changed data, changed bytes and a changed record are refused."""
    path = build().path
    write(tmp_path / "set1", ["something else"])
    with pytest.raises(DataError, match="is not the data"):
        ChunkDatabase(path)
    write(tmp_path / "set1", TEXTS[1])
    shard = path / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="checksum differs"):
        ChunkDatabase(path, verify=True)
    shard.write_bytes(content[:-4])
    with pytest.raises(DataError, match="half built"):
        ChunkDatabase(path)
    record = json.loads((path / "database.json").read_text())
    (path / "database.json").write_text(json.dumps({**record, "data_paths": ["x"]}))
    with pytest.raises(DataError, match="different lengths"):
        ChunkDatabase(path)
    (path / "database.json").write_text(json.dumps({**record, "data": "x"}))
    with pytest.raises(DataError, match="`data` is `x`"):
        ChunkDatabase(path)


def test_no_text(build: Build, tmp_path: Path) -> None:
    """Data without a chunk, and a tokenizer without an end token, are refused."""
    with pytest.raises(DataError, match="is empty"):
        build([["", "    "]])
    tokenizer = build_tokenizer("ByteTokenizer")
    tokenizer.eod = None
    with pytest.raises(ConfigError, match="no end-of-document token"):
        build_database(tmp_path / "db2", [], tokenizer, chunk_length=LENGTH, block=2)


def test_other_ids(build: Build, tmp_path: Path) -> None:
    """Tokens that the tokenizer does not have are an error that names the dataset."""
    with IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        writer.add_document([700, 800])
    indexed = IndexedDataset(tmp_path / "set")
    with pytest.raises(DataError, match="set` was prepared with another tokenizer"):
        build_database(
            tmp_path / "db",
            [Documents(indexed, (0, 1))],
            build_tokenizer("ByteTokenizer"),
            chunk_length=LENGTH,
            block=2,
        )
