"""The `cached`/`lazy` format beside `mmap`: bytes, plain fairseq files, damage, modes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmcore.base.errors import DataError
from lmcore.data.indexed import idx_writer
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.idx_writer import NumberSpool, write_index
from lmcore.data.indexed.writer import FORMATS, IndexedDatasetWriter


def write(prefix: Path, documents, dtype="uint16", dataset_impl="cached") -> Path:
    with IndexedDatasetWriter(prefix, dtype, dataset_impl=dataset_impl) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            writer.add_document(tokens, [len(sequence) for sequence in document])
    return prefix


TWO = [[[1, 2, 3]], [[4], [5]]]


def longs(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


# By hand, from the format's description: magic, version, dtype, width, N, S, D; then the arrays.
HEAD = b"TNTIDX\0\0" + longs(1, 8, 2, 3, 3, 3)
ARRAYS = longs(0, 1, 2, 3) + longs(0, 3, 4, 5) + longs(3, 1, 1)
BY_HAND = HEAD + ARRAYS + longs(0, 1, 3)


@pytest.mark.parametrize("name", ["cached", "lazy"])
def test_cached_bytes(tmp_path, name):
    """Both names give the index that the format's description gives, and bare tokens."""
    write(tmp_path / "c", TWO, dataset_impl=name)
    assert (tmp_path / "c.idx").read_bytes() == BY_HAND
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_cached_is_read(tmp_path):
    """Sequences, documents and parts are found as in the memory-mapped format."""
    (tmp_path / "c.idx").write_bytes(BY_HAND)
    (tmp_path / "c.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    dataset = IndexedDataset(tmp_path / "c")
    assert [dataset.get(i).tolist() for i in range(3)] == [[1, 2, 3], [4], [5]]
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.document_indices.tolist() == [0, 1, 3]
    assert (dataset.sizes.dtype, dataset.index.format) == (np.dtype("int32"), "cached")
    for i in (-1, 2):
        with pytest.raises(IndexError):
            dataset.document(i)


def test_plain_fairseq_is_read(tmp_path):
    """Without the document index each sequence is a document."""
    plain = HEAD[:-8] + ARRAYS
    (tmp_path / "f.idx").write_bytes(plain)
    (tmp_path / "f.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    dataset = IndexedDataset(tmp_path / "f")
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.document(0).tolist() == [1, 2, 3]
    empty = b"TNTIDX\0\0" + longs(1, 8, 2, 0, 0) + longs(0, 0)
    (tmp_path / "f.idx").write_bytes(empty)
    (tmp_path / "f.bin").write_bytes(b"")
    assert IndexedDataset(tmp_path / "f").document_count == 0


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 255), max_size=5), min_size=0, max_size=3), max_size=6
    ),
    dtype=st.sampled_from(["uint8", "int16", "uint16", "int32", "int64"]),
)
def test_same_samples_from_all_formats(tmp_path_factory, documents, dtype):
    """Every format gives the same sequences and documents."""
    folder = tmp_path_factory.mktemp("all")
    read = []
    for name in FORMATS:
        dataset = IndexedDataset(write(folder / name, documents, dtype, name))
        sequences = [dataset.get(i).tolist() for i in range(len(dataset))]
        read.append((sequences, dataset.document_indices.tolist(), dataset.sizes.tolist()))
        assert dataset.dtype == np.dtype(dtype)
        whole = [dataset.document(i).tolist() for i in range(dataset.document_count)]
        assert whole == [[t for s in document for t in s] for document in documents]
    assert read[0] == read[1] == read[2]


DAMAGE = {
    "version": (8, longs(2), "has version 2"),
    "dtype": (16, longs(99), "dtype code 99"),
    "float dtype": (16, longs(6), "float64 values"),
    "token size": (24, longs(4), "gives 4 bytes as the size of a token of type uint16"),
    "items": (32, longs(4), "expected 184 bytes, found 168"),
    "huge count": (32, longs(2**62, 2**62, 2**62), "found 168"),
    "all bits": (32, b"\xff" * 24, "found 168"),
    "dimensions": (32, longs(2, 5), "holds tensors"),
    "documents": (48, longs(2), "expected 160 bytes, found 168"),
    "no documents": (32, longs(3, 6, 0), "holds tensors"),
    "dimension offset": (64, longs(2), "one dimension each"),
    "last dimension offset": (80, longs(4), "one dimension each"),
    "first start": (88, longs(1), "sequence 0 starts at byte 2"),
    "start": (96, longs(2), "sequence 1 starts at byte 4"),
    "end": (112, longs(6), "sequence 3 starts at byte 12"),
    "negative size": (120, longs(-1), "sequence 0 has -1 tokens"),
    "huge size": (120, longs(2**31), "sequence 0 has 2147483648 tokens"),
    "largest numbers": (104, longs(2**63 - 1, 2**63 - 1), "starts at byte"),
    "size": (120, longs(2), "sequence 1 starts at byte 6"),
    "document start": (144, longs(1), "goes from 1 to 3"),
    "document order": (152, longs(4), "falls in between"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_index_is_refused(tmp_path, name):
    """Opening an altered cached index names the file and the problem."""
    offset, content, message = DAMAGE[name]
    write(tmp_path / "d", TWO)
    index = bytearray((tmp_path / "d.idx").read_bytes())
    index[offset : offset + len(content)] = content
    (tmp_path / "d.idx").write_bytes(index)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "d")
    assert message in caught.value.render()
    assert "d.idx" in caught.value.render()


@pytest.mark.parametrize("size", [0, 8, 20, 47, 55, 60, 167])
def test_truncated_index_is_refused(tmp_path, size):
    """A cached index cut anywhere is refused."""
    write(tmp_path / "t", TWO)
    (tmp_path / "t.idx").write_bytes(BY_HAND[:size])
    with pytest.raises(DataError, match=r"expected|does not begin with"):
        IndexedDataset(tmp_path / "t")


@given(
    junk=hnp.arrays(np.uint8, st.integers(0, 120)),
    keep=st.integers(0, len(BY_HAND)),
    verify=st.booleans(),
)
def test_random_index_never_does_worse_than_an_error(tmp_path_factory, junk, keep, verify):
    """Any bytes after any part of a sound index give an error, or an index that is sound."""
    folder = tmp_path_factory.mktemp("junk")
    (folder / "j.idx").write_bytes(BY_HAND[:keep] + junk.tobytes())
    try:
        index = read_index(folder / "j.idx", verify=verify)
    except DataError:
        return
    if verify:
        assert int(index.sizes.sum(dtype=np.int64)) == index.tokens


def test_modes_are_read(tmp_path):
    """The modes of a multimodal index are there, and None elsewhere."""
    write(tmp_path / "m", [[[1]], [[2, 3]]], dataset_impl="mmap")
    assert IndexedDataset(tmp_path / "m").modes is None
    with (tmp_path / "m.idx").open("ab") as file:
        file.write(b"\0\1")
    assert IndexedDataset(tmp_path / "m").modes.tolist() == [0, 1]


class _Multimodal:
    sequences = documents = 1
    multimodal = True

    def sizes(self):
        yield np.array([2])

    def document_ends(self):
        yield np.array([1])

    def modes(self):
        yield np.array([3])


def test_modes_are_written(tmp_path):
    """They are at the end of a memory-mapped index; the older format has none."""
    with (tmp_path / "m.idx").open("wb") as file:
        write_index(file, _Multimodal(), "uint16", "mmap")
    index = read_index(tmp_path / "m.idx")
    assert (index.modes.tolist(), index.sizes.tolist(), index.tokens) == ([3], [2], 2)
    with (tmp_path / "c.idx").open("wb") as file, pytest.raises(ValueError, match="no modes"):
        write_index(file, _Multimodal(), "uint16", "cached")


def test_missing_index(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(DataError, match=r"cannot read .*none.idx"):
        read_index(tmp_path / "none.idx")


def test_misnamed_index(tmp_path):
    """The ending `.bin.idx` of a copied script is recognized, with the command that repairs it."""
    (tmp_path / "arxiv-0.bin.idx").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read .*arxiv-0\.idx") as caught:
        read_index(tmp_path / "arxiv-0.idx")
    assert f"`lmcore data repair {tmp_path}/arxiv-0`" in str(caught.value.hint)
    with pytest.raises(DataError, match="cannot read") as caught:
        read_index(tmp_path / "other-0.idx")
    assert caught.value.hint is None


@pytest.mark.parametrize("dataset_impl", ["mmap", "cached"])
def test_many_documents_are_spooled(tmp_path, monkeypatch, dataset_impl):
    """The bytes written do not depend on how many numbers fit in memory."""
    documents = [[[i % 7] * (i % 4)] * (i % 3) for i in range(100)]
    write(tmp_path / "memory", documents, dataset_impl=dataset_impl)
    monkeypatch.setattr(idx_writer, "_CHUNK", 7)
    write(tmp_path / "spooled", documents, dataset_impl=dataset_impl)
    for ending in (".bin", ".idx"):
        one, other = (Path(f"{tmp_path / name}{ending}") for name in ("memory", "spooled"))
        assert one.read_bytes() == other.read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


def test_spool(tmp_path, monkeypatch):
    """Numbers come back in order, as often as asked, from file and memory."""
    monkeypatch.setattr(idx_writer, "_CHUNK", 4)
    spool = NumberSpool(tmp_path, "i")
    spool.extend(np.arange(6))
    for i in range(6, 9):
        spool.append(i)
    for _ in range(2):
        assert np.concatenate(list(spool.chunks())).tolist() == list(range(9))
    spool.append(9)
    assert len(spool) == 10
    assert np.concatenate(list(spool.chunks())).tolist() == list(range(10))
    spool.close()


def test_more_datasets_than_files_may_be_open(tmp_path):
    """The soft limit of open files is raised if a list has more datasets."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    write(tmp_path / "x", TWO)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        opened = [IndexedDataset(tmp_path / "x") for _ in range(30)]
        assert all(dataset.tokens == 5 for dataset in opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
