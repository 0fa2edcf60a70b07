"""JSON lines dealt out to train, dev and test, with provenance; indexed datasets in equal parts."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from indexed_files import write

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.metadata import DatasetMetadata, read_metadata, write_metadata
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tools import split as module
from lmcore.data.tools.merge import merge
from lmcore.data.tools.split import split_indexed, split_json


def make(path: Path, count: int, tag: str) -> str:
    text = "".join(json.dumps({"text": f"{tag}{i}"}) + "\n" for i in range(count))
    path.write_text(text)
    return str(path)


def rows(path: Path) -> list[tuple[bytes, str, int]]:
    """Return each line with the file and line that its map names."""
    lines = path.read_bytes().splitlines(keepends=True)
    places = [line.split("\t") for line in Path(f"{path}.map").read_text().splitlines()]
    return [(line, file, int(n)) for line, (file, n) in zip(lines, places, strict=True)]


def test_counts_and_provenance(tmp_path: Path) -> None:
    """The counts are exact, every line is somewhere once, and its map names where it was."""
    files = [make(tmp_path / "a.jsonl", 120, "a"), make(tmp_path / "b.jsonl", 80, "b")]
    report = split_json(files, tmp_path / "out", shares=(0.29, 0.05))
    assert [part.lines for part in report.parts] == [132, 58, 10]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{name}.json{ending}" for name in ("dev", "test", "train") for ending in ("", ".map")
    ]
    sources = {file: Path(file).read_bytes().splitlines(keepends=True) for file in files}
    seen = []
    for part in report.parts:
        found = rows(Path(part.path))
        assert len(found) == part.lines
        assert all(line == sources[file][number - 1] for line, file, number in found)
        assert [(file, number) for _, file, number in found] == sorted(
            (file, number) for _, file, number in found
        )
        seen += [(file, number) for _, file, number in found]
    assert sorted(seen) == [(file, n + 1) for file in files for n in range(len(sources[file]))]


@given(total=st.integers(3, 200), dev=st.integers(1, 60), test=st.integers(0, 39))
@example(total=100, dev=29, test=0)  # in binary 28.999999999999996
@example(total=100, dev=57, test=28)  # 56.99999999999999 and 28.000000000000004
def test_shares_are_decimal(tmp_path_factory, total: int, dev: int, test: int) -> None:
    """Of N lines each part has floor(share N), computed in decimal; train has what is left."""
    folder = tmp_path_factory.mktemp("shares")
    source = make(folder / "a.jsonl", total, "x")
    shares = (dev / 100,) if test == 0 else (dev / 100, test / 100)
    expected = [total * dev // 100] + ([total * test // 100] if test else [])
    expected.insert(0, total - sum(expected))
    if not all(expected):
        with pytest.raises(DataError, match="gets no lines"):
            split_json([source], folder / "out", shares=shares)
        return
    report = split_json([source], folder / "out", shares=shares)
    assert [part.lines for part in report.parts] == expected


def test_seed(tmp_path: Path) -> None:
    """A seed gives the same choice again, another gives another, spread over the whole input."""
    source = make(tmp_path / "a.jsonl", 1000, "x")
    chosen = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        split_json([source], tmp_path / name, shares=(0.2,), seed=seed)
        assert not (tmp_path / name / "test.json").exists()
        chosen.append([number for _, _, number in rows(tmp_path / name / "dev.json")])
    assert chosen[0] == chosen[1] != chosen[2]
    # 200 of 1000: each tenth has 20 of them on average, with a deviation of about 3.8
    assert all(5 < sum(at < n <= at + 100 for n in chosen[0]) < 40 for at in range(0, 1000, 100))


def test_lines_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines go, a mark of byte order too; endings stay, and a last line gets one."""
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"long": "0123456789"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"b": 1}\n') + gzip.compress(b'{"b": 2}'))
    monkeypatch.setattr(module, "_PIECE", 8)
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz")]
    split_json(files, tmp_path / "out", shares=(0.25,))
    found = rows(tmp_path / "out/train.json") + rows(tmp_path / "out/dev.json")
    assert sorted(found, key=lambda row: row[1:]) == [
        (b'{"a": 1}\r\n', files[0], 1),
        (b'{"long": "0123456789"}\n', files[0], 4),
        (b'{"b": 1}\n', files[1], 1),
        (b'{"b": 2}\n', files[1], 2),
    ]


@pytest.mark.parametrize(
    "shares", [(), (0.1, 0.1, 0.1), (5.0,), (0.0,), (-0.1,), (0.5, 0.5), (0.5, 0.0)]
)
def test_shares_that_are_none(tmp_path: Path, shares: tuple[float, ...]) -> None:
    """Shares that are not parts of one, or leave nothing, are refused."""
    source = make(tmp_path / "a.jsonl", 10, "x")
    with pytest.raises(ConfigError, match="--test-percent"):
        split_json([source], tmp_path / "out", shares=shares)


def test_input_that_is_none(tmp_path: Path) -> None:
    """Standard input, arrays, files given twice and outputs as inputs are refused."""
    source = make(tmp_path / "a.jsonl", 10, "x")
    (tmp_path / "list.json").write_text('[{"text": "a"}]')
    (tmp_path / "b.txt").write_text("a")
    for inputs, message in (
        (["-"], "cannot be read twice"),
        (
            [str(tmp_path / "list.json")],
            "is not JSON lines\nwhy: its format is json\n\nhint: convert",
        ),
        (
            [str(tmp_path / "b.txt")],
            "is not JSON lines\nwhy: its format is text\n\nhint: give only",
        ),
        ([source, source], "is given twice"),
        ([str(tmp_path / "none.jsonl")], "no such file"),
    ):
        with pytest.raises(DataError, match=message):
            split_json(inputs, tmp_path / "out", shares=(0.2,))


def test_earlier_split(tmp_path: Path) -> None:
    """Its files are not replaced, not in part either: its test lines would be in train as well."""
    source, out = make(tmp_path / "a.jsonl", 10, "x"), tmp_path / "out"
    split_json([source], out, shares=(0.2, 0.1))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match=r"train\.json` exists already") as caught:
        split_json([source], out, shares=(0.2,))
    assert "files of an earlier split" in str(caught.value.why)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for path in out.iterdir():
        if path.name != "test.json":
            path.unlink()
    with pytest.raises(ConfigError, match=r"test\.json` exists already"):
        split_json([source], out, shares=(0.2,))


def test_part_without_lines(tmp_path: Path) -> None:
    """The message says how many lines each part would get."""
    source = make(tmp_path / "a.jsonl", 10, "x")
    with pytest.raises(DataError, match="`test` gets no lines") as caught:
        split_json([source], tmp_path / "out", shares=(0.2, 0.01))
    assert caught.value.why == "of 10 lines the parts get train 8, dev 2 and test 0"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("grow", [True, False])
def test_input_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grow: bool) -> None:
    """Lines that come or go between the passes are an error, and no file is left."""
    source = make(tmp_path / "a.jsonl", 10, "x")
    real = module._assign

    def change(*arguments) -> None:
        make(tmp_path / "a.jsonl", 11 if grow else 9, "x")
        real(*arguments)

    monkeypatch.setattr(module, "_assign", change)
    with pytest.raises(DataError, match="changed while it was read"):
        split_json([source], tmp_path / "out", shares=(0.2,))
    assert not (tmp_path / "out").exists()


def test_damaged_input(tmp_path: Path) -> None:
    """A compressed file that is cut short is an error, and no file is left."""
    whole = gzip.compress(os.urandom(1000).hex().encode() + b"\n")
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        split_json([str(tmp_path / "a.jsonl.gz")], tmp_path / "out", shares=(0.2,))
    assert not (tmp_path / "out").exists()


def test_full_disk(tmp_path: Path) -> None:
    """A full disk is an error; no file of the split is left, nor the directory made for it."""
    large = make(tmp_path / "b.jsonl", 9000, "y")
    (tmp_path / "there").mkdir()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        for name in ("new/out", "there"):
            with pytest.raises(DataError, match="cannot write"):
                split_json([large], tmp_path / name, shares=(0.2,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b.jsonl", "there"]


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


def test_full_disk_of_indexed(tmp_path):
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
