"""Merging datasets: the bytes of one pass, and everything that must be refused."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_files import write

from lmcore.base.errors import DataError
from lmcore.data.indexed import copy as document_ranges
from lmcore.data.indexed.copy import copy_bytes
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.metadata import (
    DatasetMetadata,
    metadata_path,
    read_metadata,
    write_metadata,
)
from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer
from lmcore.data.tools.merge import find_datasets, merge


def describe(prefix: str, tokenizer=None, *, append_eod=False) -> None:
    dataset = IndexedDataset(prefix)
    metadata = DatasetMetadata.of(
        tokenizer or ByteTokenizer(),
        append_eod=append_eod,
        documents=dataset.document_count,
        sequences=len(dataset),
        tokens=dataset.tokens,
        dtype=dataset.dtype.name,
    )
    write_metadata(prefix, metadata)


def content(prefix) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


documents = st.lists(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=0, max_size=3), max_size=4
)


@given(
    parts=st.lists(documents, min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    dataset_impl=st.sampled_from(["mmap", "cached"]),
)
def test_merge_is_one_pass(tmp_path_factory, parts, dtype, dataset_impl):
    """Merged parts have the bytes of writing all documents at once, in every format."""
    folder = tmp_path_factory.mktemp("merge")
    prefixes = [write(folder / str(i), part, dtype, dataset_impl) for i, part in enumerate(parts)]
    whole = [document for part in parts for document in part]
    expected = write(folder / "whole", whole, dtype, dataset_impl)
    report = merge(prefixes, str(folder / "merged"))
    assert content(folder / "merged") == content(expected)
    assert (report.documents, report.datasets) == (len(whole), len(parts))
    assert report.bytes == sum(map(len, content(expected)))


def test_merge_is_one_preparation(shared_data, tmp_path):
    """Parts of a real corpus prepared apart and merged are the corpus, metadata included."""
    from lmcore.data.prepare.run import PrepareRequest, prepare

    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz") as corpus:
        lines = corpus.readlines()
    cuts = [0, 10, 500, 1000]
    prefixes = []
    for i, (first, last) in enumerate(pairwise(cuts)):
        (tmp_path / f"{i}.jsonl").write_bytes(b"".join(lines[first:last]))
        prefixes.append(f"{tmp_path}/part{i}_text_document")
    parts = [str(tmp_path / f"{i}.jsonl") for i in range(3)]
    for names, prefix in [*(([part], f"part{i}") for i, part in enumerate(parts)), (parts, "all")]:
        output = str(tmp_path / prefix)
        prepare(PrepareRequest(tuple(names), output, ByteTokenizer(), append_eod=True))
    merge(prefixes, str(tmp_path / "merged"))
    assert content(tmp_path / "merged") == content(tmp_path / "all_text_document")
    one, other = (
        metadata_path(tmp_path / name).read_bytes() for name in ("merged", "all_text_document")
    )
    assert one == other


def test_foreign_files(shared_data, tmp_path):
    """Files of other people's Megatron are merged; without metadata none is written."""
    folder = shared_data / "interop/megatron_indexed"
    parts = [str(folder / f"ag_news_prompt_{what}_document") for what in ("inputs", "targets")]
    report = merge(parts, str(tmp_path / "merged"))
    merged = IndexedDataset(tmp_path / "merged")
    assert (merged.document_count, merged.tokens) == (200, 5945 + 244)
    assert not report.metadata
    for at, part in zip((0, 100), map(IndexedDataset, parts), strict=True):
        assert all((merged.get(at + i) == part.get(i)).all() for i in range(100))
    assert names(tmp_path) == {"merged.bin", "merged.idx"}


@pytest.mark.parametrize("failing", [(), ("copy_file_range",), ("copy_file_range", "sendfile")])
@pytest.mark.parametrize("piece", [3, 1 << 26])
def test_copying_without_the_kernel(tmp_path, monkeypatch, failing, piece):
    """Another way of copying gives the same bytes if the file system refuses one."""

    def refuse(*_args, **_keywords):
        raise OSError(errno.EXDEV, "refused")

    for name in failing:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(document_ranges, "_COPY_BYTES", piece)
    parts = [write(tmp_path / "a", [[[1, 2, 3]]]), write(tmp_path / "b", [[[4]], [[5, 6]]])]
    merge(parts, str(tmp_path / "m"))
    assert np.fromfile(tmp_path / "m.bin", dtype="<u2").tolist() == [1, 2, 3, 4, 5, 6]


def test_copy_of_a_file_that_is_too_short(tmp_path):
    """The number of bytes that were there is returned, not waited for."""
    (tmp_path / "a").write_bytes(b"abc")
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        assert copy_bytes(source.fileno(), target.fileno(), 1, 10) == 2
    assert (tmp_path / "b").read_bytes() == b"bc"


def test_modes_are_kept(tmp_path):
    """Modes of multimodal parts are concatenated; an empty part without modes fits."""
    parts = [write(tmp_path / name, [[[1], [2]]]) for name in "ab"]
    for name, modes in (("a", b"\0\1"), ("b", b"\2\0")):
        with (tmp_path / f"{name}.idx").open("ab") as file:
            file.write(modes)
    merge([*parts, write(tmp_path / "empty", [])], str(tmp_path / "m"))
    assert read_index(tmp_path / "m.idx").modes.tolist() == [0, 1, 2, 0]
    with pytest.raises(DataError, match=r"is multimodal and .* is not"):
        merge([*parts, write(tmp_path / "c", [[[1]]])], str(tmp_path / "n"))


def test_metadata_is_merged(tmp_path):
    """Counts are summed; the tokenizer's files may lie elsewhere for each part."""
    parts = [write(tmp_path / "a", [[[1, 2]]]), write(tmp_path / "b", [[[3]], [[4]]])]
    for part in parts:
        describe(part, append_eod=True)
    report = merge(parts, str(tmp_path / "m"))
    metadata = read_metadata(tmp_path / "m")
    assert report.metadata
    assert (metadata.documents, metadata.sequences, metadata.tokens) == (3, 3, 4)
    assert (metadata.append_eod, metadata.fingerprint) == (True, ByteTokenizer().fingerprint())


def test_some_without_metadata(tmp_path, caplog):
    """A part without metadata gives an output without; a line says so, old metadata is removed."""
    parts = [write(tmp_path / "a", [[[1, 2]]]), write(tmp_path / "b", [[[3]]])]
    describe(parts[0])
    write(tmp_path / "m", [[[1]]])
    describe(str(tmp_path / "m"))
    assert not merge(parts, str(tmp_path / "m"), overwrite=True).metadata
    assert read_metadata(tmp_path / "m") is None
    assert "`" + parts[1] + "` has no metadata" in caplog.text


def test_a_copy_is_named(tmp_path, caplog):
    """Two datasets of the same content are merged with a warning."""
    parts = [write(tmp_path / name, [[[1, 2]]]) for name in "ab"]
    merge(parts, str(tmp_path / "m"))
    assert f"`{parts[0]}` and `{parts[1]}` have the same content" in caplog.text


def test_none_with_metadata(tmp_path, caplog):
    """A line says that vocabularies were not compared if no part has metadata."""
    parts = [write(tmp_path / "a", [[[1, 2]]]), write(tmp_path / "b", [[[3]]])]
    merge(parts[:1], str(tmp_path / "m"))
    assert caplog.text == ""
    assert not merge(parts, str(tmp_path / "m"), overwrite=True).metadata
    assert "vocabularies cannot be compared" in caplog.text


def _mixed_dtype(folder: Path) -> list[str]:
    return [write(folder / "a", [[[1]]]), write(folder / "b", [[[1]]], "int32")]


def _mixed_format(folder: Path) -> list[str]:
    return [write(folder / "a", [[[1]]]), write(folder / "b", [[[1]]], "uint16", "cached")]


def _described(folder: Path, *tokenizers) -> list[str]:
    prefixes = []
    for i, (tokenizer, append_eod) in enumerate(tokenizers):
        prefixes.append(write(folder / str(i), [[[1]]]))
        describe(prefixes[-1], tokenizer, append_eod=append_eod)
    return prefixes


def _truncated(folder: Path) -> list[str]:
    parts = [write(folder / "a", [[[1]]]), write(folder / "b", [[[1, 2]]])]
    (folder / "b.bin").write_bytes(b"\0\0")
    return parts


def _uncounted_end(folder: Path) -> list[str]:
    parts = [write(folder / "a", [[[1]]]), write(folder / "b", [[[1, 2]]])]
    with (folder / "b.bin").open("ab") as file:
        file.write(b"\0\0")
    return parts


def _missing(folder: Path) -> list[str]:
    return [write(folder / "a", [[[1]]]), str(folder / "none")]


def _missing_bin(folder: Path) -> list[str]:
    parts = [write(folder / "a", [[[1]]]), write(folder / "b", [[[1]]])]
    (folder / "b.bin").unlink()
    return parts


def _linked(folder: Path) -> list[str]:
    part = write(folder / "a", [[[1]]])
    for ending in (".bin", ".idx"):
        Path(f"{folder / 'link'}{ending}").symlink_to(f"{part}{ending}")
    return [part, str(folder / "link")]


def _foreign_metadata(folder: Path) -> list[str]:
    parts = _described(folder, (ByteTokenizer(), False))
    write(folder / "0", [[[1, 2]]])
    return parts


REFUSED = {
    "token type": (_mixed_dtype, "differ in their token type"),
    "format": (_mixed_format, "differ in their format"),
    "vocabulary": (
        lambda f: _described(f, (NullTokenizer(9), False), (NullTokenizer(8), False)),
        "have different vocabularies",
    ),
    "vocabulary of the third": (
        lambda f: [
            write(f / "x", [[[1]]]),
            *_described(f, (NullTokenizer(9), False), (ByteTokenizer(), False)),
        ],
        "have different vocabularies",
    ),
    "end of documents": (
        lambda f: _described(f, (ByteTokenizer(), True), (ByteTokenizer(), False)),
        "differ in `append_eod`",
    ),
    "truncated": (_truncated, "expected 4 bytes, found 2"),
    "uncounted end": (_uncounted_end, "expected 4 bytes, found 6"),
    "missing": (_missing, "no such file"),
    "missing bin": (_missing_bin, "no such file"),
    "twice": (lambda f: [write(f / "a", [[[1]]])] * 2, "is given twice"),
    "twice by a link": (_linked, "are the same data"),
    "metadata of another": (_foreign_metadata, "does not match the dataset"),
    "none": (lambda f: [], "no dataset is given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    """The error names the part that cannot be merged; no file is written or lost."""
    make, message = REFUSED[name]
    parts = make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError) as caught:
        merge(parts, str(tmp_path / "m"))
    assert message in caught.value.render()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_eod_of_other_id_is_refused(tmp_path):
    """Two vocabularies of one size whose documents end differently are distinguished."""
    parts = _described(tmp_path, (ByteTokenizer(), True), (ByteTokenizer(), True))
    path = metadata_path(parts[1])
    path.write_text(path.read_text().replace('"eod": 256', '"eod": 0'))
    with pytest.raises(DataError, match="differ in `eod`"):
        merge(parts, str(tmp_path / "m"))


def test_output_that_is_a_source_is_refused(tmp_path):
    """A dataset is never replaced by a merge of itself."""
    parts = [write(tmp_path / "a", [[[1]]]), write(tmp_path / "b", [[[2]]])]
    before = content(parts[0])
    with pytest.raises(DataError, match="is one of the input datasets"):
        merge(parts, parts[0])
    assert content(parts[0]) == before


@pytest.fixture
def small_disk():
    """Let this process write files of 64 KiB at most; beyond, writing fails as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "documents", [[[[1] * 30_000]], [[[1]]] * 4000], ids=["in the tokens", "in the index"]
)
def test_full_disk(tmp_path, small_disk, documents):
    """A disk that is full in mid-write is an error; the older output and the sources stay."""
    parts = [write(tmp_path / name, documents) for name in "ab"]
    write(tmp_path / "m", [[[1]]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    small_disk()
    with pytest.raises(DataError, match="cannot write") as caught:
        merge(parts, str(tmp_path / "m"), overwrite=True)
    assert "make room" in caught.value.hint
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_source_that_changes_meanwhile(tmp_path, monkeypatch, ending):
    """A source that shrinks or is replaced between check and copy is an error, not an output."""
    parts = [write(tmp_path / "a", [[[1, 2]]]), write(tmp_path / "b", [[[3], [4]], [[5]]])]
    real = document_ranges.copy_bytes

    def shrink(source, target, start, count):
        if ending == ".bin":
            os.truncate(tmp_path / "b.bin", 2)
        else:
            write(tmp_path / "b", [[[9]]])
            (tmp_path / "b.bin").write_bytes(bytes(100))
        return real(source, target, start, count)

    monkeypatch.setattr(document_ranges, "copy_bytes", shrink)
    with pytest.raises(DataError, match="changed while it was read"):
        merge(parts, str(tmp_path / "m"))
    assert names(tmp_path) == {"a.bin", "a.idx", "b.bin", "b.idx"}


def test_more_parts_than_files_may_be_open(tmp_path):
    """Parts are opened one after another, so that the limit of open files does not matter."""
    parts = [write(tmp_path / f"{i:03}", [[[i]]]) for i in range(100)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (in_use + 12, in_use + 12) if hard < 0 else (in_use + 12, hard)
    )
    try:
        merge(parts, str(tmp_path / "m"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == in_use + 12
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert IndexedDataset(tmp_path / "m").get(99).tolist() == [99]


def test_find_datasets(tmp_path):
    """All pairs of a directory are found, by name; files under way and others are not."""
    for name in ("b", "a.1", "c"):
        write(tmp_path / name, [[[1]]])
    (tmp_path / "x.idx.12.tmp").touch()
    (tmp_path / "readme").touch()
    assert [Path(prefix).name for prefix in find_datasets(tmp_path)] == ["a.1", "b", "c"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no dataset in"):
        find_datasets(tmp_path / "empty")
    with pytest.raises(DataError, match="cannot read"):
        find_datasets(tmp_path / "none")
