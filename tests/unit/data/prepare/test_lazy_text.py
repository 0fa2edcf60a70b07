"""Texts that are read document by document from the disk."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.prepare.lazy_text import LazyText, write_lazy_text

DOCUMENTS = ["plain", "", "Grüße\n", "\N{SNOWMAN} and \N{GRINNING FACE}", "e\u0301", "\r\n\x00end"]


def test_reopened_without_its_source(tmp_path):
    """Any document in any order, from the two files alone."""
    source = tmp_path / "source.txt"
    source.write_text("".join(DOCUMENTS), encoding="utf-8")
    write_lazy_text(iter(DOCUMENTS), tmp_path / "deep/text", source="abc")
    source.unlink()
    text = LazyText(tmp_path / "deep/text")
    assert len(text) == 6
    assert text.source == "abc"
    assert [text[i] for i in (3, 0, 5, 1, 2, 4)] == [DOCUMENTS[i] for i in (3, 0, 5, 1, 2, 4)]
    assert list(text) == DOCUMENTS
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [
        "text.offsets",
        "text.text",
        "text.text.json",
    ]
    for i in (6, -1):
        with pytest.raises(IndexError):
            text[i]


def test_offsets_count_bytes(tmp_path):
    """The index says where a document begins in the file, whatever its characters take."""
    write_lazy_text(DOCUMENTS, tmp_path / "t", source="")
    offsets = np.fromfile(tmp_path / "t.offsets", "<i8").tolist()
    raw = (tmp_path / "t.text").read_bytes()
    assert offsets == [0, *np.cumsum([len(one.encode()) for one in DOCUMENTS])]
    assert raw == "".join(DOCUMENTS).encode()


@given(documents=st.lists(st.text(max_size=30), max_size=20))
def test_any_text(tmp_path_factory, documents):
    """Documents are read back as written, also an empty list of documents."""
    folder = tmp_path_factory.mktemp("any")
    assert list(write_lazy_text(documents, folder / "t", source="")) == documents


def test_documents_are_taken_and_read_one_by_one(tmp_path):
    """Sixty megabytes take a few megabytes of memory, to write and to read."""
    tracemalloc.start()
    text = write_lazy_text(("x" * (1 << 20) for _ in range(60)), tmp_path / "t", source="")
    assert sum(len(one) for one in text) == 60 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_unfinished_text_leaves_nothing(tmp_path):
    """Neither the text nor a part of it is left if reading the documents fails."""

    def broken():
        yield "one"
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        write_lazy_text(broken(), tmp_path / "t", source="")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no text at"):
        LazyText(tmp_path / "t")


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


@pytest.mark.parametrize(
    "damage, what",
    [
        (lambda t: cut(t / "t.text"), "is damaged"),
        (lambda t: cut(t / "t.offsets", 8), "is damaged"),
        (lambda t: (t / "t.offsets").write_bytes(b"\xff" * 56), "is damaged"),
        (lambda t: (t / "t.text.json").write_text("{}"), "cannot read"),
        (lambda t: (t / "t.text.json").write_text("no"), "cannot read"),
        (lambda t: (t / "t.text").unlink(), "no text at"),
        (lambda t: (t / "t.text.json").unlink(), "no text at"),
        (
            lambda t: (t / "t.text.json").write_text(
                json.dumps({"format": 9, "documents": 6, "bytes": 49, "source": ""})
            ),
            "is damaged",
        ),
    ],
)
def test_damage(tmp_path, damage, what):
    """Files that do not fit together are refused, never read in part."""
    write_lazy_text(DOCUMENTS, tmp_path / "t", source="")
    damage(tmp_path)
    with pytest.raises(DataError, match=what):
        LazyText(tmp_path / "t")


def test_altered_bytes(tmp_path):
    """A document whose bytes are no longer UTF-8 is an error with its number."""
    write_lazy_text(["abc", "def"], tmp_path / "t", source="")
    (tmp_path / "t.text").write_bytes(b"abc\xff\xfe\xfd")
    text = LazyText(tmp_path / "t")
    assert text[0] == "abc"
    with pytest.raises(DataError, match="document 1 of the text"):
        text[1]
