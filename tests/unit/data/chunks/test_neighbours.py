"""The neighbours of samples: what training reads, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.chunks.database import ChunkDatabase, Documents, build_database
from lmcore.data.chunks.neighbours import (
    NeighboursRecord,
    begin_neighbours,
    database_path,
    neighbours_path,
    neighbours_store,
    open_neighbours,
)
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import build_tokenizer

END = 256
ORDER = "0123456789abcdef0123456789abcdef"
NEIGHBOURS = np.array(
    [
        [[3, 0, -1], [1, -1, -1]],
        [[0, 1, 2], [4, 3, 2]],
        [[-1, -1, -1], [2, 4, 0]],
    ]
)
"""Of three samples of two chunks, three each."""


@pytest.fixture
def database(tmp_path: Path) -> ChunkDatabase:
    """Has the chunks `abcd`, `efgh`, `ij`, `klmn`, `op`; the first three are of one document."""
    with IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        for text in ("abcdefghij", "klmnop"):
            writer.add_document([*text.encode(), END])
    indexed = IndexedDataset(tmp_path / "set")
    tokenizer = build_tokenizer("ByteTokenizer")
    path = database_path(tmp_path / "project")
    return build_database(path, [Documents(indexed, (0, 2))], tokenizer, chunk_length=4, block=9)


def record(database: ChunkDatabase, **changes: Any) -> NeighboursRecord:
    values: dict[str, Any] = {
        "part": "train",
        "samples": ORDER,
        "source": "set",
        "seq_length": 8,
        "chunk_length": 4,
        "num_neighbors": 3,
        "num_queried": 5,
        "num_samples": 3,
        "block": 2,
        "database": database.record.fingerprint,
        "index": "x",
    }
    return NeighboursRecord(**{**values, **changes})


@pytest.fixture
def project(tmp_path: Path, database: ChunkDatabase) -> Path:
    folder = tmp_path / "project"
    path = neighbours_path(folder, "train", ORDER)
    found = begin_neighbours(path, record(database))
    for number in range(len(found.rows)):
        rows = NEIGHBOURS[2 * number : 2 * number + 2].astype(np.int32)
        neighbours_store(path).write(number, rows)
    return folder


def spelled(tokens: Any) -> Any:
    """Return the tokens as texts, with a dot for padding."""
    return [["".join("." if t == END else chr(t) for t in k) for k in row] for row in tokens]


def test_tokens(project: Path) -> None:
    """A neighbour is its chunk and the next ones of its document; missing ones are padding."""
    found = open_neighbours(project, "train", description=ORDER, verify=True)
    assert (found.chunk_length, found.num_samples, found.num_neighbors) == (4, 3, 3)
    assert found.padding == END
    tokens = found.tokens(0, 2, 2)
    assert tokens.dtype == np.int64
    assert tokens.shape == (2, 2, 8)
    assert spelled(tokens) == [["klmnop..", "abcdefgh"], ["efghij..", "........"]]
    assert spelled(found.tokens(1, 3, 1)) == [["abcd", "efgh", "ij.."], ["op..", "klmn", "ij.."]]
    assert spelled(found.tokens(2, 1, 3)) == [["." * 12], ["ij.........."]]
    np.testing.assert_array_equal(found.chunks(2), NEIGHBOURS[2])


def test_what_there_is_not(project: Path) -> None:
    """A sample beyond the last one is an error with a hint; more neighbours are a mistake."""
    found = open_neighbours(project, "train", description=ORDER)
    for sample in (3, -1):
        with pytest.raises(
            DataError, match=r"no neighbours[\s\S]*3 samples[\s\S]*lmcore data retro"
        ):
            found.tokens(sample, 1, 1)
    for neighbors, chunks in ((4, 1), (0, 1), (1, 0)):
        with pytest.raises(ValueError, match="of 3 neighbours"):
            found.tokens(0, neighbors, chunks)


def test_another_order(project: Path, tmp_path: Path) -> None:
    """Neighbours of another order, of another part and of no project are refused."""
    with pytest.raises(DataError, match=r"train samples in their order[\s\S]*--eval-interval"):
        open_neighbours(project, "train", description="f" * 32)
    for folder in (project, tmp_path):
        with pytest.raises(DataError, match="has no neighbours of valid samples"):
            open_neighbours(folder, "valid", description=ORDER)
    with pytest.raises(DataError, match="another order"):
        open_neighbours(project, "train", description=ORDER[:16] + "f" * 16)
    with pytest.raises(DataError, match="no such directory"):
        open_neighbours(tmp_path / "nowhere", "train", description=ORDER)


def test_another_database(project: Path, tmp_path: Path) -> None:
    """Neighbours of chunks of another database are refused; the length is named if it differs."""
    indexed = IndexedDataset(tmp_path / "set")
    tokenizer = build_tokenizer("ByteTokenizer")
    for length, why in (
        (4, "both have chunks of 4 tokens; the tokenizer or the documents differ"),
        (2, "they were found for chunks of 4 tokens, and the database has chunks of 2"),
    ):
        other = build_database(
            *(tmp_path / f"other{length}", [Documents(indexed, (0, 1))], tokenizer),
            chunk_length=length,
            block=9,
        )
        with pytest.raises(DataError, match="not chunks of the database") as caught:
            open_neighbours(project, "train", description=ORDER, database=lambda other=other: other)
        assert str(caught.value.why).startswith(why)


def test_half_written_and_damaged(project: Path) -> None:
    """A missing shard and a changed byte are refused."""
    path = neighbours_path(project, "train", ORDER)
    shard = path / "shard-00001.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"\x07")
    with pytest.raises(DataError, match="checksum differs"):
        open_neighbours(project, "train", description=ORDER, verify=True)
    shard.unlink()
    with pytest.raises(DataError, match="half built"):
        open_neighbours(project, "train", description=ORDER)
    neighbours_store(path).write(1, NEIGHBOURS[:1, :, :2])
    with pytest.raises(DataError, match="it has int64"):
        open_neighbours(project, "train", description=ORDER)


def test_a_longer_run(project: Path, database: ChunkDatabase) -> None:
    """More samples of the same order make the last shard incomplete; fewer change nothing."""
    path = neighbours_path(project, "train", ORDER)
    assert begin_neighbours(path, record(database, num_samples=2)).num_samples == 3
    open_neighbours(project, "train", description=ORDER)
    longer = begin_neighbours(path, record(database, num_samples=4))
    assert neighbours_store(path).missing(longer.rows) == [1]
    with pytest.raises(DataError, match="half built"):
        open_neighbours(project, "train", description=ORDER)
    with pytest.raises(ConfigError, match="another number of neighbours"):
        begin_neighbours(path, record(database, num_neighbors=4))
