"""Datasets cut by a number of documents: contents kept, counts held, nothing half done."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_files import write

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.metadata import DatasetMetadata, read_metadata, write_metadata
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tools.merge import merge
from lmcore.data.tools.split_indexed import split_indexed


def content(prefix) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


documents = st.lists(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=0, max_size=3), max_size=6
)


@given(
    parts=st.lists(documents, min_size=1, max_size=3).filter(any),
    samples=st.integers(1, 7),
    dataset_impl=st.sampled_from(["mmap", "cached"]),
)
def test_contents_are_kept(tmp_path_factory, parts, samples, dataset_impl):
    """No file has more documents than asked, all but the last have as many; merged they are all."""
    folder = tmp_path_factory.mktemp("split")
    prefixes = [
        write(folder / f"in{i}", part, dataset_impl=dataset_impl) for i, part in enumerate(parts)
    ]
    whole = [document for part in parts for document in part]
    report = split_indexed(prefixes, str(folder / "out"), samples=samples)
    counts = [IndexedDataset(file.prefix).document_count for file in report.files]
    assert counts == [file.documents for file in report.files]
    assert all(count == samples for count in counts[:-1])
    assert 1 <= counts[-1] <= samples
    assert sum(counts) == len(whole)
    for number, file in enumerate(report.files):
        assert file.prefix == f"{folder}/out-{number:05}"
        some = whole[number * samples : (number + 1) * samples]
        assert content(file.prefix) == content(
            write(folder / "expected", some, dataset_impl=dataset_impl)
        )
    merge([file.prefix for file in report.files], str(folder / "again"))
    assert content(folder / "again") == content(
        write(folder / "whole", whole, dataset_impl=dataset_impl)
    )


def test_modes_and_metadata(tmp_path):
    """Modes stay with their sequences; each file's metadata has its own counts."""
    prefix = write(tmp_path / "in", [[[1], [2]], [[3]], [[4, 5]]])
    with (tmp_path / "in.idx").open("ab") as file:
        file.write(b"\0\1\2\3")
    tokenizer = ByteTokenizer()
    write_metadata(
        prefix,
        DatasetMetadata.of(
            tokenizer, append_eod=False, documents=3, sequences=4, tokens=5, dtype="uint16"
        ),
    )
    split_indexed([prefix], str(tmp_path / "out"), samples=2)
    modes = [read_index(tmp_path / f"out-0000{i}.idx").modes.tolist() for i in range(2)]
    assert modes == [[0, 1, 2], [3]]
    found = [read_metadata(tmp_path / f"out-0000{i}") for i in range(2)]
    assert [(one.documents, one.sequences, one.tokens) for one in found] == [(2, 3, 3), (1, 1, 2)]
    assert found[0].fingerprint == tokenizer.fingerprint()


@pytest.mark.parametrize("name", ["out-00007.bin", "out-00000.idx", "out-100000.meta.json"])
def test_earlier_files_are_not_mixed_with(tmp_path, name):
    """Nothing is written if files with such names exist, because some might stay."""
    prefix = write(tmp_path / "in", [[[1]]])
    (tmp_path / name).write_text("old")
    with pytest.raises(ConfigError, match="exists already"):
        split_indexed([prefix], str(tmp_path / "out"), samples=1)
    assert (tmp_path / name).read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3


def test_refused(tmp_path):
    """Sets that do not fit together, none at all, and empty ones are errors."""
    one = write(tmp_path / "a", [[[1]]])
    with pytest.raises(DataError, match="differ in their format"):
        split_indexed(
            [one, write(tmp_path / "b", [], dataset_impl="cached")], str(tmp_path / "o"), samples=1
        )
    with pytest.raises(DataError, match="no documents to split"):
        split_indexed([write(tmp_path / "c", [])], str(tmp_path / "o"), samples=1)
    with pytest.raises(DataError, match="no dataset is given"):
        split_indexed([], str(tmp_path / "o"), samples=1)
    with pytest.raises(DataError, match="no such file"):
        split_indexed([one, str(tmp_path / "none")], str(tmp_path / "o"), samples=1)
    assert not list(tmp_path.glob("o*"))


def test_full_disk(tmp_path):
    """A disk that is full in the second of several files leaves none of them."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    prefix = write(tmp_path / "in", [[[1]], [[1] * 60_000]])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with pytest.raises(DataError, match="cannot write"):
            split_indexed([prefix], str(tmp_path / "out"), samples=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name for path in tmp_path.iterdir()} == {"in.bin", "in.idx"}
