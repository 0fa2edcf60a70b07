"""Indexed datasets: Megatron's bytes, files of other tools, and damage of every kind."""

from __future__ import annotations

import hashlib
import resource
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lmcore.base.errors import DataError
from lmcore.data.indexed.dataset import IndexedDataset, token_dtype
from lmcore.data.indexed.writer import IndexedDatasetWriter

VECTOR = "416ba3f8d9601192c5b0c9424ce7e61d6ac2d9d464dba8e5ee55deb8247de3aa"


def write(prefix: Path, documents, dtype="uint16") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_published_vector(tmp_path):
    """Documents [1,2,3] and [4,5] as uint16 give the published 82 bytes of index."""
    write(tmp_path / "v", [[1, 2, 3], [4, 5]])
    index = (tmp_path / "v.idx").read_bytes()
    assert len(index) == 82
    assert hashlib.sha256(index).hexdigest() == VECTOR
    assert (tmp_path / "v.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.bin", "v.idx"]


@pytest.mark.parametrize(
    "vocab_size, dtype", [(257, "uint16"), (65499, "uint16"), (65500, "int32")]
)
def test_token_dtype(vocab_size, dtype):
    """Vocabularies under 65,500 ids are stored as uint16, others as int32."""
    assert token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize(
    "name, sequences, tokens, first",
    [
        ("test_text_document", 1000, 5000, [111214, 343, 54365900, 77, 131072]),
        ("ag_news_prompt_targets_document", 100, 244, [126148, 2]),
        ("ag_news_prompt_inputs_document", 100, 5945, None),
    ],
)
def test_foreign_files(shared_data, tmp_path, name, sequences, tokens, first):
    """Files of other people's Megatron are read, and written again with the same bytes."""
    prefix = shared_data / "interop/megatron_indexed" / name
    dataset = IndexedDataset(prefix)
    assert (len(dataset), dataset.document_count) == (sequences, sequences)
    assert (dataset.tokens, dataset.dtype) == (tokens, np.dtype("int32"))
    if first is not None:
        assert dataset.get(0).tolist() == first
    write(tmp_path / "again", [dataset.get(i) for i in range(len(dataset))], dataset.dtype)
    for ending in (".bin", ".idx"):
        again = Path(f"{tmp_path / 'again'}{ending}").read_bytes()
        assert again == Path(f"{prefix}{ending}").read_bytes()


@given(data=st.data())
def test_round_trip(tmp_path_factory, data):
    """Written data is read back: tokens, sizes, documents; one by one or many at once."""
    dtype = data.draw(st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]))
    top = int(np.iinfo(dtype).max)
    documents = data.draw(
        st.lists(
            st.lists(st.lists(st.integers(0, top), max_size=5), min_size=0, max_size=3), max_size=5
        )
    )
    folder = tmp_path_factory.mktemp("round")
    with IndexedDatasetWriter(folder / "x", dtype) as writer:
        for sequences in documents:
            writer.add_document(list(chain(*sequences)), [len(s) for s in sequences])
    dataset = IndexedDataset(folder / "x")
    flat = [s for sequences in documents for s in sequences]
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == flat
    assert dataset.document_count == len(documents)
    assert np.diff(dataset.document_indices).tolist() == [len(s) for s in documents]
    assert dataset.tokens == sum(map(len, flat))


def test_get_returns_parts_and_refuses_what_is_outside(tmp_path):
    """`get` gives views of parts of a sequence and never reads into the next one."""
    dataset = IndexedDataset(write(tmp_path / "g", [[1, 2, 3], [4, 5]]))
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(1, 2).tolist() == []
    assert not dataset.get(0).flags.writeable
    for arguments in ((2,), (-1,), (0, 4), (0, -1), (0, 1, 3), (0, 0, -1)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)


def test_empty_dataset(tmp_path):
    """A dataset without documents is written and opened."""
    dataset = IndexedDataset(write(tmp_path / "e", []))
    assert (len(dataset), dataset.document_count, dataset.tokens) == (0, 0, 0)


def test_multimodal_index_is_read(tmp_path):
    """The mode of each sequence at the end of a multimodal index is passed over."""
    write(tmp_path / "m", [[1], [2, 3]])
    with (tmp_path / "m.idx").open("ab") as file:
        file.write(b"\0\1")
    assert len(IndexedDataset(tmp_path / "m")) == 2


# Offsets in the .idx of two documents: see docs/reference/file-formats.md.
DAMAGE = {
    "magic": (0, b"NOTANIDX\0", "is not an index"),
    "magic of the other format": (0, b"TNTIDX\0\0", "has version"),
    "version": (9, struct.pack("<Q", 2), "has version 2"),
    "dtype": (17, b"\x09", "dtype code 9"),
    "float dtype": (17, b"\x06", "float64 values"),
    "sequence count": (18, struct.pack("<Q", 3), "expected 94 bytes, found 82"),
    "huge sequence count": (18, struct.pack("<Q", 2**63), "found 82"),
    "all bits": (18, b"\xff" * 16, "found 82"),
    "document count": (26, struct.pack("<Q", 2), "expected 74 bytes, found 82"),
    "negative size": (34, struct.pack("<i", -3), "sequence 0 has -3 tokens"),
    "size": (34, struct.pack("<i", 2), "sequence 1 starts at byte 6"),
    "last size": (38, struct.pack("<i", 1), "expected 8 bytes, found 10"),
    "pointer": (50, struct.pack("<q", 8), "sequence 1 starts at byte 8"),
    "first pointer": (42, struct.pack("<q", 2), "sequence 0 starts at byte 2"),
    "document start": (58, struct.pack("<q", 1), "goes from 1 to 2"),
    "document end": (74, struct.pack("<q", 3), "goes from 0 to 3"),
    "document order": (66, struct.pack("<q", 5), "falls in between"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_index_is_refused(tmp_path, name):
    """Opening an altered index names the file and the problem."""
    offset, content, message = DAMAGE[name]
    write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    index = bytearray((tmp_path / "d.idx").read_bytes())
    index[offset : offset + len(content)] = content
    (tmp_path / "d.idx").write_bytes(index)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "d")
    assert message in caught.value.render()
    assert "d.idx" in caught.value.render()


@given(junk=hnp.arrays(np.uint8, st.integers(0, 120)), keep=st.integers(0, 82))
def test_random_index_never_does_worse_than_an_error(tmp_path_factory, junk, keep):
    """Any bytes after any part of a sound index give an error or a dataset that can be read."""
    folder = tmp_path_factory.mktemp("junk")
    write(folder / "j", [[1, 2, 3], [4, 5]])
    sound = (folder / "j.idx").read_bytes()
    (folder / "j.idx").write_bytes(sound[:keep] + junk.tobytes())
    try:
        dataset = IndexedDataset(folder / "j")
    except DataError:
        return
    assert sum(len(dataset.get(i)) for i in range(len(dataset))) == dataset.tokens == 5


@pytest.mark.parametrize("size", [0, 5, 20, 33, 34, 60, 81])
def test_truncated_index_is_refused_with_both_sizes(tmp_path, size):
    """An index cut anywhere is refused, with the bytes expected and found."""
    write(tmp_path / "t", [[1, 2, 3], [4, 5]])
    whole = (tmp_path / "t.idx").read_bytes()
    (tmp_path / "t.idx").write_bytes(whole[:size])
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "t")
    assert "expected" in caught.value.why or "does not begin with" in caught.value.why
    assert size < 9 or f"found {size}" in caught.value.why


@pytest.mark.parametrize(
    "size, hint", [(8, "cut short"), (0, "cut short"), (12, "end-of-document")]
)
def test_bin_of_another_size_is_refused(tmp_path, size, hint):
    """A `.bin` that is shorter or longer than the sizes say is refused, with both numbers."""
    write(tmp_path / "b", [[1, 2, 3], [4, 5]])
    (tmp_path / "b.bin").write_bytes(b"\0" * size)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "b")
    assert f"expected 10 bytes, found {size}" in caught.value.why
    assert hint in caught.value.hint


def test_without_verification_ends_are_checked_still(tmp_path):
    """`verify=False` passes over the middle of the pointers, not over their end."""
    write(tmp_path / "q", [[1, 2], [3], [4, 5]])
    sound = (tmp_path / "q.idx").read_bytes()
    for position, refused in ((1, False), (2, True)):
        index = bytearray(sound)
        index[46 + 8 * position : 46 + 8 * position + 8] = struct.pack("<q", 2)
        (tmp_path / "q.idx").write_bytes(index)
        if refused:
            with pytest.raises(DataError, match="expected 6 bytes, found 10"):
                IndexedDataset(tmp_path / "q", verify=False)
        else:
            IndexedDataset(tmp_path / "q", verify=False)
            with pytest.raises(DataError, match="sequence 1"):
                IndexedDataset(tmp_path / "q")


@pytest.mark.parametrize(
    "given_name, hint", [("x_text_document.bin", "without its ending"), ("x", "x_text_document")]
)
def test_missing_files_suggest_what_is_there(tmp_path, given_name, hint):
    """A prefix with an ending, or without the key, is answered with the right one."""
    write(tmp_path / "x_text_document", [[1]])
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / given_name)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "gone, hint", [(".idx", "lmcore data repair"), (".bin", "copy the `.bin`")]
)
def test_half_a_dataset_is_distinguished_from_none(tmp_path, gone, hint):
    """The hint is about the missing one of the two files, not about the name."""
    prefix = write(tmp_path / "x_text_document", [[1]])
    Path(f"{prefix}{gone}").unlink()
    with pytest.raises(DataError, match=f"x_text_document{gone}") as caught:
        IndexedDataset(prefix)
    assert hint in caught.value.hint


@pytest.mark.parametrize("dtype, token", [("uint16", 65536), ("uint16", -1), ("int32", 2**31)])
def test_token_that_does_not_fit_is_refused(tmp_path, dtype, token):
    """A token beyond the type is an error, never another token; nothing is left on disk."""
    with pytest.raises(DataError, match="does not fit"):
        write(tmp_path / "f", [[1], [token]], dtype)
    assert list(tmp_path.iterdir()) == []


def test_lengths_that_do_not_sum_are_refused(tmp_path):
    """Sequence lengths must account for every token (as old Megatron's eod did not)."""
    with (
        pytest.raises(ValueError, match="3 tokens"),
        IndexedDatasetWriter(tmp_path / "l", "uint16") as writer,
    ):
        writer.add_document([1, 2, 3], [2])


def test_exception_leaves_older_files(tmp_path):
    """After a failed write the older dataset is unchanged, and there is no temporary file."""
    write(tmp_path / "o", [[1, 2, 3]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted():
        with IndexedDatasetWriter(tmp_path / "o", "uint16") as writer:
            writer.add_document([7])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_nothing_has_its_name_before_the_end(tmp_path):
    """While a dataset is written its final names do not exist."""
    with IndexedDatasetWriter(tmp_path / "n", "uint16") as writer:
        writer.add_document(range(100_000 % 60_000))
        assert not {"n.bin", "n.idx"} & {p.name for p in tmp_path.iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == {"n.bin", "n.idx"}


@pytest.fixture
def small_disk():
    """Let this process write files of 64 KiB at most; beyond, writing fails as on a full disk."""
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_is_an_error_that_loses_nothing(tmp_path, small_disk):
    """A full disk is an error that says so, and older files stay complete."""
    write(tmp_path / "s", [[1, 2, 3]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(DataError, match="cannot write") as caught:
        write(tmp_path / "s", [np.zeros(1 << 17, dtype=np.int32)] * 20)
    assert "make room" in caught.value.hint
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_directory_that_cannot_be_made_is_an_error(tmp_path):
    """A file where the directory should be is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        IndexedDatasetWriter(tmp_path / "file/x", "uint16")
