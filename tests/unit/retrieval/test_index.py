"""An index of blocks: what it has, what it is compared with, and what is built again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.base.lock import LockFile
from lmcore.retrieval.encoder import TextEncoder
from lmcore.retrieval.index import BlockIndex, build_index
from lmcore.retrieval.index_encoder import require_encoder
from lmcore.retrieval.search import search

Make = Callable[..., TextEncoder]


@pytest.fixture
def build(data: Path, make_encoder: Make, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "index", seed: int = 1, **changes: Any) -> Path:
        settings: dict[str, Any] = {
            "data_path": str(data / "d_text_sentence"),
            "titles_data_path": str(data / "d_title_document"),
            "seq_length": None,
            "one_sentence": False,
            "batch": 8,
            "shard": 16,
        }
        build_index(make_encoder(seed), tmp_path / name, **(settings | changes))
        return tmp_path / name

    return make


def test_every_block_is_there_once(build: Any, make_encoder: Make) -> None:
    """All sentences of all documents, in order, with their titles; a vector is the block's own."""
    encoder, index = make_encoder(), BlockIndex(build())
    source, rows = index.source(encoder), np.load(index.path / "blocks.npy")
    assert len(rows) == index.record.blocks > 20
    np.testing.assert_array_equal(rows, source.rows)
    texts = [source.text(number) for number in range(len(rows))]
    lines = [f"w{n} w{40 + i} w{60 + i} ." for n in range(20) for i in range(3 + n % 7)]
    assert " ".join(one.text for one in texts) == " ".join(lines)
    assert all(one.title == f"w{one.document}" == one.text.split()[0] for one in texts)
    whole = np.concatenate([vectors for _, vectors in index.shards()])
    for number in (0, 7, len(rows) - 1):
        alone = encoder.blocks([source.tokens(number)], batch=1)
        np.testing.assert_allclose(whole[number], alone[0], atol=1e-6)


def test_batches_and_shards_do_not_matter(build: Any) -> None:
    """Other batches and shards give the same vectors, up to rounding."""
    first, second = BlockIndex(build()), BlockIndex(build("other", batch=3, shard=1000))
    whole = [np.concatenate([part for _, part in one.shards()]) for one in (first, second)]
    assert second.record.shards == 1 < first.record.shards
    np.testing.assert_allclose(*whole, atol=1e-6)


def test_a_stopped_build_goes_on(build: Any, caplog: Any) -> None:
    """A half built index is refused; the next build writes the missing shards, bit for bit."""
    path = build()
    shard = path / "shard-00001.npy"
    before, others = shard.read_bytes(), (path / "shard-00000.npy").stat().st_mtime_ns
    shard.unlink()
    with pytest.raises(DataError, match="half built"):
        BlockIndex(path)
    build()
    assert shard.read_bytes() == before
    assert (path / "shard-00000.npy").stat().st_mtime_ns == others
    BlockIndex(path)


def test_a_shard_of_another_process_is_left_to_it(build: Any) -> None:
    """A build leaves out what another one is building."""
    path = build()
    shard = path / "shard-00001.npy"
    shard.unlink()
    with LockFile(path / ".shard-00001.lock").held() as own:
        assert own
        build()
        assert not shard.exists()
    build()
    assert shard.exists()


def test_an_index_of_other_parts(build: Any, make_encoder: Make, data: Path) -> None:
    """Another encoder, other data and other sizes are refused, by name."""
    path = build()
    for changes, words in (
        ({"seed": 2}, "another encoder"),
        ({"titles_data_path": None}, "another dataset, or other titles"),
        ({"seq_length": 12}, "another length of the blocks"),
        ({"one_sentence": True}, "another choice by `--use-one-sent-docs`"),
        ({"shard": 8}, "another number of blocks of a shard"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(**changes)
    with pytest.raises(ConfigError, match="16 positions"):
        build(seq_length=17)
    index = BlockIndex(path)
    require_encoder(index, make_encoder(1))
    with pytest.raises(ConfigError, match="another encoder"):
        require_encoder(index, make_encoder(2))


def test_a_directory_with_other_files(build: Any, tmp_path: Path) -> None:
    """Nothing is written among them."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        build("full")
    assert [one.name for one in (tmp_path / "full").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["file", "file/index"])
def test_a_file_in_place_of_a_directory(build: Any, tmp_path: Path, name: str) -> None:
    """It is named, and kept."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file` is a file, not a directory"):
        build(name)
    assert (tmp_path / "file").read_text() == "x"


def test_a_damaged_list_of_blocks(build: Any) -> None:
    """The next build writes it again."""
    path = build() / "blocks.npy"
    before = path.read_bytes()
    path.write_bytes(before[:100])
    build()
    assert path.read_bytes() == before


def test_moved_data(build: Any, make_encoder: Make, data: Path, tmp_path: Path) -> None:
    """A build with the new paths computes nothing, and the index reads the data there."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    paths = {
        "data_path": str(folder / "d_text_sentence"),
        "titles_data_path": str(folder / "d_title_document"),
    }
    path = build(**paths)
    shard = (path / "shard-00000.npy").stat().st_mtime_ns
    folder.rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"is gone[\s\S]*with the new paths"):
        BlockIndex(path).source(make_encoder())
    build()
    assert len(BlockIndex(path).source(make_encoder()).rows) > 20
    assert (path / "shard-00000.npy").stat().st_mtime_ns == shard


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda record: record.update(version=9), "version is 9"),
        (lambda record: record.update(blocks="many"), "`blocks` is `many`"),
        (lambda record: record.update(blocks=0), "`blocks` is `0`"),
        (lambda record: record.pop("size"), "has not the keys"),
    ],
)
def test_a_damaged_record(build: Any, change: Any, words: str) -> None:
    """It is an error that names the value."""
    path = build() / "index.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=words):
        BlockIndex(path.parent)


def test_damaged_vectors(build: Any) -> None:
    """A changed byte, and a pickled array, are refused."""
    path = build()
    shard = path / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        BlockIndex(path)
    with pytest.raises(DataError, match="is no index"):
        BlockIndex(path.parent)


def test_changed_data(build: Any, make_encoder: Make, data: Path, tmp_path: Path) -> None:
    """A dataset with other titles than at the build is refused."""
    index = BlockIndex(build())
    record = json.loads((index.path / "index.json").read_text())
    record["titles_data_path"] = ""
    (index.path / "index.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="is not the data"):
        BlockIndex(index.path).source(make_encoder())


def test_search(build: Any, make_encoder: Make, monkeypatch: Any) -> None:
    """Both engines find the blocks of a whole product in float64, whatever the parts are."""
    index, encoder = BlockIndex(build()), make_encoder()
    questions = encoder.questions([f"w{n} w{50 + n}" for n in range(9)])
    whole = np.concatenate([part for _, part in index.shards()]).astype(np.float64)
    scores = questions.astype(np.float64) @ whole.T
    wanted = np.argsort(-scores, axis=1)[:, :7]
    monkeypatch.setattr("lmcore.retrieval.search._ROWS", 5)
    found = search(index, questions, top=7)
    np.testing.assert_array_equal(found.blocks, wanted)
    np.testing.assert_allclose(
        found.scores, np.take_along_axis(scores, wanted, axis=1), rtol=1e-5, atol=1e-6
    )
    assert search(index, questions, top=10_000).blocks.shape == (9, len(whole))
    pytest.importorskip("faiss")
    by_faiss = search(index, questions, top=7, engine="faiss")
    np.testing.assert_array_equal(by_faiss.blocks, wanted)


def test_questions(make_encoder: Make) -> None:
    """An empty question is refused; a long one is cut; order and batches do not matter."""
    encoder = make_encoder()
    with pytest.raises(ConfigError, match="empty"):
        encoder.questions(["w1", "  "])
    texts = ["w1 w2", "w3 " * 40, "w4"]
    together = encoder.questions(texts, batch=2)
    alone = np.concatenate([encoder.questions([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-6)
