"""Repairs: what can be known is repaired in new files, what cannot is said; nothing is lost."""

from __future__ import annotations

import errno
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_files import describe, write

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.blend.file_list import corpus_of
from lmcore.data.indexed import idx_writer, token_scan
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.metadata import DatasetMetadata, read_metadata, verify_files
from lmcore.data.tools.merge import find_datasets
from lmcore.data.tools.repair import RepairRequest, hyphenated, repair


def known(prefix: str | Path) -> DatasetMetadata:
    """Return the metadata of a repaired dataset without its checksums, which are verified here."""
    assert verify_files(prefix, (0, 1)) is not None
    found = read_metadata(prefix)
    assert found is not None
    return replace(found, checksums=None)


EOD = 256


def content(prefix) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def spoil(prefix: str, documents, dtype="uint16", *, after_empty: bool) -> None:
    """Write the `.bin` as a tool does that appends the end and does not count it."""
    flat: list[int] = []
    for document in documents:
        tokens = [token for sequence in document for token in sequence]
        flat += [*tokens, EOD] if tokens or after_empty else tokens
    np.array(flat, dtype=dtype).tofile(f"{prefix}.bin")


def right(documents, *, after_empty: bool):
    """Return the documents with their end in their last sequence."""
    ended = []
    for document in documents:
        tokens = any(document)
        takes = document and (tokens or after_empty)
        ended.append([*document[:-1], [*document[-1], EOD]] if takes else document)
    return ended


sequences = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3)


@given(
    documents=st.lists(sequences, min_size=2, max_size=8),
    after_empty=st.booleans(),
    known=st.booleans(),
    dataset_impl=st.sampled_from(["mmap", "cached"]),
    group=st.integers(1, 4),
)
def test_uncounted_ends_are_counted(
    tmp_path_factory, documents, after_empty, known, dataset_impl, group
):
    """The repaired files match a tool that counts the ends; the spoilt ones stay."""
    filled = sum(map(any, documents))
    if not after_empty and (filled < 2 or (filled == 0 and not known)):
        return
    folder = tmp_path_factory.mktemp("ends")
    prefix = write(folder / "x", documents, "uint16", dataset_impl)
    spoil(prefix, documents, after_empty=after_empty)
    before = files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_scan, "_DOCUMENTS", group)
        report = repair(
            RepairRequest(prefix, output_prefix=f"{folder}/y", eod=EOD if known else None)
        )
    expected = right(documents, after_empty=after_empty)
    assert content(folder / "y") == content(write(folder / "z", expected, "uint16", dataset_impl))
    assert "uncounted" in report.found[0]
    assert {name: files(folder)[name] for name in before} == before


def test_metadata_says_that_ends_were_counted(tmp_path):
    """The metadata says that documents have ends if the counted end token is the tokenizer's."""
    documents = [[[1], [2]], [[3]]]
    prefix = write(tmp_path / "x", documents)
    describe(prefix, append_eod=False)
    spoil(prefix, documents, after_empty=True)
    report = repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))
    ended = write(tmp_path / "z", right(documents, after_empty=True))
    describe(ended)
    assert known(tmp_path / "y") == read_metadata(ended)
    assert report.found[-1].endswith("`y.meta.json` has `append_eod: true`")
    assert not read_metadata(prefix).append_eod


@pytest.mark.parametrize(
    "documents, eod, append_eod",
    [
        ([[[1, EOD]], [[EOD]]], None, True),
        ([[[1, EOD]], [[2, 3]]], None, False),
        ([[[1, 9]], [[2, 9]]], 9, False),
    ],
)
def test_metadata_of_a_rebuilt_index(tmp_path, documents, eod, append_eod):
    """All documents end with the tokenizer's end, or the metadata does not say so."""
    prefix = write(tmp_path / "x", documents)
    describe(prefix, append_eod=False)
    repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", rebuild=True, eod=eod))
    assert read_metadata(tmp_path / "y").append_eod is append_eod


def test_metadata_beside_the_original_stays(tmp_path):
    """Metadata that says that nothing was appended is not replaced; it is said."""
    prefix = write(tmp_path / "x", [[[1, EOD]]])
    describe(prefix, append_eod=False)
    (tmp_path / "x.idx").unlink()
    report = repair(RepairRequest(prefix))
    assert "`x.meta.json` has `append_eod: false`" in report.found[-1]
    assert not read_metadata(prefix).append_eod


def test_uncounted_ends_keep_modes(tmp_path):
    """The modes of multimodal data stay with their sequences."""
    documents = [[[1], [2]], [[3]]]
    prefix = write(tmp_path / "x", documents)
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(b"\0\1\2")
    spoil(prefix, documents, after_empty=True)
    repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))
    index = read_index(tmp_path / "y.idx")
    assert (index.modes.tolist(), index.sizes.tolist()) == ([0, 1, 2], [1, 2, 2])


@pytest.mark.parametrize(
    "tokens, eod, why",
    [
        ([1, 2, 256, 3, 7], None, "are not the ends of the documents"),
        ([1, 2, 256, 3, 256], 9, "token 9 does not follow each document"),
        ([1, 2, 256, 3], None, "are not the ends of the documents"),
        ([1, 2], None, "the file is truncated"),
    ],
)
def test_unknown_metadata_is_reported(tmp_path, tokens, eod, why):
    """Tokens that are too many or too few for another reason are not guessed at."""
    prefix = write(tmp_path / "x", [[[1, 2]], [[3]]])
    np.array(tokens, dtype="<u2").tofile(tmp_path / "x.bin")
    before = files(tmp_path)
    with pytest.raises(DataError, match="the correct sizes are unknown") as caught:
        repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", eod=eod))
    assert why in caught.value.render()
    assert files(tmp_path) == before


def test_one_document_does_not_tell_its_end(tmp_path):
    """Of a single document any last token might be meant, unless it is named."""
    prefix = write(tmp_path / "x", [[[1, 2]]])
    np.array([1, 2, 256], dtype="<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="are unknown"):
        repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))
    repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", eod=256))
    assert IndexedDataset(tmp_path / "y").get(0).tolist() == [1, 2, 256]


def test_document_without_sequences_has_no_place_for_an_end(tmp_path):
    """A document without a sequence for the token is an error, not a guess."""
    prefix = write(tmp_path / "x", [[[1]], []])
    np.array([1, 256, 256], dtype="<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="are unknown"):
        repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))


@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=8),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    piece=st.integers(1, 7),
)
def test_index_is_rebuilt(tmp_path_factory, documents, dtype, piece):
    """From tokens that end each document the missing index is made, byte for byte."""
    folder = tmp_path_factory.mktemp("rebuild")
    ended = [[[*document, 11]] for document in documents]
    prefix = write(folder / "x", ended, dtype)
    before = files(folder)
    (folder / "x.idx").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idx_writer, "_PIECE_TOKENS", piece)
        report = repair(RepairRequest(prefix, eod=11, dtype=dtype))
    assert files(folder) == before
    assert report.written == (f"{prefix}.idx",)
    assert report.found[0] == "the index is missing"


def test_metadata_has_eod_and_dtype(tmp_path):
    """Neither has to be named where the metadata is there; another name gets metadata too."""
    prefix = write(tmp_path / "x", [[[1, 2, EOD]], [[3, EOD]]])
    describe(prefix)
    sound = content(prefix)
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0damaged")
    report = repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))
    assert content(tmp_path / "y") == sound
    assert "the index is damaged" in report.found[0]
    assert known(tmp_path / "y") == read_metadata(prefix)
    with pytest.raises(ConfigError, match="never replaces a file"):
        repair(RepairRequest(prefix))
    with pytest.raises(ConfigError, match="never replaces a file"):
        repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))


def test_tokens_after_the_last_end(tmp_path):
    """They are a document, and it is said; metadata with other counts stays, and that is said."""
    prefix = write(tmp_path / "x", [[[1, EOD]], [[2, 3]]])
    describe(prefix, documents=5)
    (tmp_path / "x.idx").unlink()
    report = repair(RepairRequest(prefix))
    assert IndexedDataset(prefix).document(1).tolist() == [2, 3]
    assert "2 tokens after the last end are taken as a document" in report.found
    assert report.found[-1] == "`x.meta.json` has other counts, and was not changed"
    assert read_metadata(prefix).documents == 5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "needs `--eod` and `--dtype`"),
        ({"eod": 2}, "needs `--dtype`"),
        ({"eod": 9, "dtype": "uint16"}, "token 9 does not occur"),
        ({"eod": 2, "dtype": "int64"}, "does not hold whole tokens"),
        ({"eod": 2, "dtype": "float32"}, "is not a token type"),
    ],
)
def test_index_that_cannot_be_rebuilt(tmp_path, changes, message):
    """Missing facts are requested by the error; facts that do not fit are refused."""
    prefix = write(tmp_path / "x", [[[1, 2]], [[3, 2, 4]]])
    (tmp_path / "x.idx").unlink()
    with pytest.raises(DataError, match=message):
        repair(RepairRequest(prefix, **changes))
    assert set(files(tmp_path)) == {"x.bin"}


def test_rebuild_on_request(tmp_path):
    """A sound index is made again on request; the type of a token is the old one's."""
    prefix = write(tmp_path / "x", [[[1], [2, EOD, 3, EOD]]])
    repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", rebuild=True, eod=EOD))
    made = IndexedDataset(tmp_path / "y")
    assert [made.get(i).tolist() for i in range(2)] == [[1, 2, EOD], [3, EOD]]


@pytest.mark.parametrize("damage", [None, 40])
@pytest.mark.parametrize("dataset_impl", ["mmap", "cached"])
def test_rebuilt_index_keeps_the_format(tmp_path, dataset_impl, damage):
    """It has the format of the old one, which its first bytes tell though the rest be damaged."""
    documents = [[[1, EOD]], [[2, 3, EOD]]]
    prefix = write(tmp_path / "x", documents, dataset_impl=dataset_impl)
    expected = content(prefix)
    idx = tmp_path / "x.idx"
    idx.write_bytes(idx.read_bytes()[:damage])
    wanted = {"eod": EOD, "dtype": "uint16", "rebuild": True}
    report = repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", **wanted))
    assert content(tmp_path / "y") == expected
    assert (report.dataset_impl, report.dtype) == (dataset_impl, "uint16")


def test_rebuilt_index_has_no_modes(tmp_path):
    """The report says that the modes are left out."""
    prefix = write(tmp_path / "x", [[[1, EOD]]])
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(b"\1")
    report = repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y", rebuild=True, eod=EOD))
    assert "the modes of its sequences are lost" in report.found
    assert read_index(tmp_path / "y.idx").modes is None


@pytest.mark.parametrize(
    "given_name", ["x", "x.bin", "x.idx", "x.bin.idx", "x.bin.bin"], ids=lambda name: name
)
def test_double_endings(tmp_path, given_name):
    """A file with one ending too many gets the right name beside, however it is called."""
    prefix = write(tmp_path / "x", [[[1, 2]]])
    sound = content(prefix)
    (tmp_path / "x.idx").rename(tmp_path / "x.bin.idx")
    (tmp_path / "x.bin").rename(tmp_path / "x.bin.bin")
    report = repair(RepairRequest(f"{tmp_path}/{given_name}"))
    assert content(prefix) == sound
    assert report.found == (
        "`x.bin.bin` has a duplicate suffix",
        "`x.bin.idx` has a duplicate suffix",
    )
    assert set(files(tmp_path)) == {"x.bin", "x.idx", "x.bin.bin", "x.bin.idx"}


def test_two_files_for_one(tmp_path):
    """Neither name is chosen if both the right one and a wrong one exist."""
    prefix = write(tmp_path / "x", [[[1, 2]]])
    (tmp_path / "x.bin.idx").write_bytes(b"other")
    with pytest.raises(DataError, match=r"both .* exist"):
        repair(RepairRequest(prefix))


def test_a_repair_can_be_repeated(tmp_path):
    """The file that an earlier repair left is no second index, and no second dataset."""
    prefix = write(tmp_path / "c4_en_00000", [[[1, 2]]])
    (tmp_path / "c4_en_00000.idx").rename(tmp_path / "c4_en_00000.bin.idx")
    repair(RepairRequest(prefix))
    assert repair(RepairRequest(prefix)).found == ()
    assert find_datasets(tmp_path) == [prefix]
    report = repair(RepairRequest(prefix, hyphens=True))
    assert report.prefix == f"{tmp_path}/c4-en-00000"
    assert [one for one in report.found if "its corpus is now `c4`" in one]
    (tmp_path / "c4_en_00000.bin.idx").unlink()  # a link to the same file
    (tmp_path / "c4_en_00000.bin.idx").write_bytes(b"other")
    assert len(find_datasets(tmp_path)) == 3


def test_a_directory_is_no_dataset(tmp_path):
    """The hint has the command for each dataset of it."""
    with pytest.raises(DataError, match="without its tokens") as caught:
        repair(RepairRequest(f"{tmp_path}"))
    assert f"for one in {tmp_path}/*.bin" in caught.value.hint


def test_hyphens(tmp_path):
    """Underscores of the name, not of the directory, become hyphens in new names."""
    folder = tmp_path / "my_data"
    prefix = write(folder / "arxiv_0001_text_document", [[[1, EOD]]])
    describe(prefix)
    report = repair(RepairRequest(prefix, hyphens=True))
    assert report.prefix == f"{folder}/arxiv-0001-text-document" == hyphenated(prefix)
    assert corpus_of(report.prefix) == "arxiv"
    assert content(report.prefix) == content(prefix)
    assert known(report.prefix) == read_metadata(prefix)
    assert len(report.written) == 3
    with pytest.raises(ConfigError, match="exclude each other"):
        repair(RepairRequest(prefix, hyphens=True, output_prefix="x"))


def test_sound_dataset(tmp_path):
    """Nothing is found and nothing written."""
    prefix = write(tmp_path / "x", [[[1, 2]]])
    before = files(tmp_path)
    report = repair(RepairRequest(prefix))
    assert (report.found, report.written, report.documents) == ((), (), 1)
    assert files(tmp_path) == before


def test_missing_tokens(tmp_path):
    """Without the `.bin` nothing can be repaired."""
    with pytest.raises(DataError, match="without its tokens"):
        repair(RepairRequest(f"{tmp_path}/none"))


def test_disk_that_cannot_link(tmp_path, monkeypatch):
    """A file system without hard links gets a copy."""

    def refuse(*_args):
        raise OSError(errno.EXDEV, "refused")

    prefix = write(tmp_path / "x_y", [[[1, 2]]])
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    repair(RepairRequest(prefix, hyphens=True))
    assert content(tmp_path / "x-y") == content(prefix)
    assert not (tmp_path / "x-y.bin").samefile(tmp_path / "x_y.bin")
    assert len(files(tmp_path)) == 4


def test_full_disk(tmp_path):
    """A disk that is full in the index leaves what was there, and no new name."""
    documents = [[[1]]] * 20_000
    prefix = write(tmp_path / "x", documents)
    spoil(prefix, documents, after_empty=True)
    before = files(tmp_path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with pytest.raises(DataError, match="cannot write"):
            repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/y"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert files(tmp_path) == before
