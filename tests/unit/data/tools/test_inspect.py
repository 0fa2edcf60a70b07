"""Findings of an inspection: counts, copies, ends of documents, and problems."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_files import describe, write

from lmcore.base.errors import DataError
from lmcore.data.indexed import token_scan
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.token_scan import document_bounds, scan_tokens
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tools.inspect import inspect, read_documents

documents = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=0, max_size=3), max_size=12
)


@given(
    documents=documents,
    eod=st.integers(0, 9),
    piece=st.integers(1, 9),
    group=st.integers(1, 4),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    dataset_impl=st.sampled_from(["mmap", "cached"]),
)
def test_scan_is_what_counting_by_hand_gives(
    tmp_path_factory, documents, eod, piece, group, dtype, dataset_impl
):
    """A scan finds the same as plain Python, with pieces of any size."""
    prefix = write(tmp_path_factory.mktemp("s") / "s", documents, dtype, dataset_impl)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_scan, "_PIECE_TOKENS", piece)
        patch.setattr(token_scan, "_DOCUMENTS", group)
        patch.setattr(token_scan, "_SORTED_HASHES", group)
        found = scan_tokens(IndexedDataset(prefix), eod=eod, vocab_size=7, top=3)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    counts = Counter(token for document in flat for token in document)
    assert found.distinct == len(counts)
    assert (found.lowest, found.highest) == (min(counts, default=None), max(counts, default=None))
    assert found.frequent == tuple(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:3])
    assert (found.outside, found.beyond) == (sum(counts[token] for token in (7, 8, 9)), 0)
    assert found.ended == sum(document[-1] == eod for document in flat if document)
    assert found.ends_inside == counts[eod] - found.ended
    copies = [(i, flat.index(one)) for i, one in enumerate(flat) if one and flat.index(one) < i]
    assert found.duplicates == len(copies)
    assert found.duplicate_examples == tuple(copies[:10])


def test_ids_that_are_too_high_to_count(tmp_path):
    """Ids of 2**24 and more, and negative ones, are counted together."""
    prefix = write(tmp_path / "h", [[[1, 1 << 24, 5]]], "int32")
    np.array([1, 1 << 24, -1], dtype="<i4").tofile(tmp_path / "h.bin")
    found = scan_tokens(IndexedDataset(prefix), eod=None, vocab_size=None)
    assert (found.beyond, found.distinct, found.frequent) == (2, 1, ((1, 1),))
    assert (found.lowest, found.highest, found.outside, found.ended) == (-1, 1 << 24, None, None)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Scanning takes a piece of memory at a time, not the file: of 32 MiB less than 4."""
    prefix = write(tmp_path / "m", [[[i % 200] * 65_536] for i in range(256)])
    monkeypatch.setattr(token_scan, "_PIECE_TOKENS", 1 << 16)
    dataset = IndexedDataset(prefix)
    tracemalloc.start()
    scan_tokens(dataset, eod=None, vocab_size=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_bounds(tmp_path, monkeypatch):
    """Bounds of documents are tokens, with empty documents and sequences among them."""
    monkeypatch.setattr(token_scan, "_DOCUMENTS", 2)
    for dataset_impl in ("mmap", "cached"):
        prefix = write(
            tmp_path / dataset_impl, [[[1, 2], [3]], [], [[]], [[4]], []], "int32", dataset_impl
        )
        pieces = [bounds.tolist() for bounds in document_bounds(IndexedDataset(prefix).index)]
        assert pieces == [[0, 3, 3], [3, 3, 4], [4, 4]]


def test_report(tmp_path):
    """A sound dataset is described; its metadata gives the end of documents."""
    prefix = write(tmp_path / "r", [[[104, 105, 256]], [[104, 105, 256]], []], "uint16", "cached")
    describe(prefix)
    report = inspect(prefix, scan=True)
    assert report.problems == ()
    assert (report.documents, report.empty_documents, report.empty_sequences) == (3, 1, 0)
    assert (report.dataset_impl, report.multimodal, report.tokenizer) == (
        "cached",
        False,
        "ByteTokenizer",
    )
    assert (report.scan.eod, report.scan.ended, report.scan.duplicates) == (256, 2, 1)
    assert inspect(prefix).scan is None


def test_ends_that_are_missing(tmp_path):
    """Documents without the end token that the metadata claims are reported."""
    prefix = write(tmp_path / "e", [[[1, 256]], [[2]], [[3, 300]]])
    describe(prefix)
    problems = inspect(prefix, scan=True).problems
    assert problems == (
        "1 token outside the ids of the tokenizer's vocabulary",
        "the metadata says that documents end with token 256, 1 of 3 do",
    )
    assert inspect(prefix).problems == ()


def test_metadata_that_differs(tmp_path):
    """Counts of the metadata that are not the dataset's are problems."""
    prefix = write(tmp_path / "d", [[[1]]])
    describe(prefix, tokens=7)
    assert inspect(prefix).problems == ("the metadata says tokens 7, the dataset has 1",)


@pytest.mark.parametrize("dataset_impl", ["mmap", "cached"])
def test_missing_eod(tmp_path, dataset_impl):
    """Tokens that were appended to documents and not counted are explained, with their counts."""
    prefix = write(tmp_path / "u", [[[1, 2]], [[3]]], "uint16", dataset_impl)
    np.array([1, 2, 256, 3, 256], dtype="<u2").tofile(tmp_path / "u.bin")
    report = inspect(prefix, scan=True)
    assert (report.documents, report.tokens, report.scan) == (2, 3, None)
    assert "expected 6 bytes, found 10" in report.problems[0]
    assert "each of 2 documents is followed by token 256" in report.problems[1]
    assert len(inspect(prefix, eod=9).problems) == 1


def test_unreadable_index(tmp_path):
    """An index that cannot be read is a problem; a file that is missing is an error."""
    prefix = write(tmp_path / "x", [[[1]]])
    (tmp_path / "x.idx").write_bytes(b"junk")
    report = inspect(prefix)
    assert (report.documents, report.dataset_impl, report.bytes) == (None, None, 6)
    assert "is not an index" in report.problems[0]
    (tmp_path / "x.idx").unlink()
    with pytest.raises(DataError, match="no such file"):
        inspect(prefix)


def test_documents(tmp_path):
    """Documents are decoded where the tokenizer is known, and shown as ids where not."""
    prefix = write(tmp_path / "t", [[[104], [105, 256]], [[300]]])
    tokenizer = ByteTokenizer()
    (known,) = read_documents(prefix, [0], tokenizer)
    assert (known.lengths, known.tokens) == ((1, 2), (104, 105, 256))
    assert known.text == tokenizer.decode([104, 105, 256])
    assert known.text.startswith("hi")
    (unknown,) = read_documents(prefix, [1], None)
    assert (unknown.tokens, unknown.text) == ((300,), None)
    with pytest.raises(DataError, match="document 1 cannot be decoded"):
        read_documents(prefix, [1], tokenizer)
    with pytest.raises(DataError, match="documents are 0 to 1"):
        read_documents(prefix, [2], tokenizer)
    with pytest.raises(DataError, match="has no documents"):
        read_documents(write(tmp_path / "n", []), [0], tokenizer)
