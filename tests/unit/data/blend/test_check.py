"""Checks of a run's datasets before they are opened: all problems of lists and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.config.load import load_config
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.data.blend.check import inspect_sources
from lmcore.data.indexed.metadata import DatasetMetadata, metadata_path, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets `a`, `b` of bytes, `n` of numbers, and `foreign` without metadata."""
    monkeypatch.chdir(tmp_path)
    numbers = build_tokenizer("NullTokenizer", vocab_size=9)
    for name, tokenizer in (("a", ByteTokenizer()), ("b", ByteTokenizer()), ("n", numbers)):
        _write(name, tokenizer)
    _write("foreign", ByteTokenizer())
    metadata_path("foreign").unlink()


def _write(name: str, tokenizer: Tokenizer) -> None:
    with IndexedDatasetWriter(name, "uint16") as writer:
        writer.add_document([1, 2])
    metadata = DatasetMetadata.of(
        tokenizer, append_eod=False, documents=1, sequences=1, tokens=2, dtype="uint16"
    )
    write_metadata(name, metadata)


def found(line: str) -> list[str]:
    _, problems = inspect_sources(load_config(line.split()).sources[0])
    return [problem.what for problem in problems]


@pytest.mark.parametrize(
    "line",
    [
        "--data-path a b foreign",
        "--data-path 1 a 0 b",
        "--data-path a nowhere",
        "--train-data shakespeare",
        "--data-file-list nowhere",
        "",
    ],
)
def test_sound_or_reported_by_rules(line: str) -> None:
    """Problems that the rules of the configuration report are not reported again."""
    assert found(line) == []


@pytest.mark.parametrize(
    "line",
    ["--data-path 0 a 1 b 1 n", "--train-data-path a --valid-data-path n", "--data-path a.bin n"],
)
def test_different_tokenizers(line: str) -> None:
    """Datasets of two tokenizers are reported, whatever else is wrong with them."""
    assert found(line) == ["`a` and `n` were not prepared with the same tokenizer"]


def test_every_data_set_is_named() -> None:
    """With the tokenizer that made it."""
    _, (problem,) = inspect_sources(load_config(["--data-path", "a", "n", "b"]).sources[0])
    assert "`ByteTokenizer`" in str(problem.why)
    assert "made `a`, `b`; `NullTokenizer`" in str(problem.why)


def test_sources_with_metadata() -> None:
    """Each dataset carries the tokenizer that made it; the list gives way to its datasets."""
    Path("list").write_text("2 a\n1 foreign\n", encoding="utf-8")
    sources, problems = inspect_sources(load_config(["--data-file-list", "list"]).sources[0])
    assert not problems
    assert sources.divided is not None
    first, second = sources.divided.sources
    assert (first.name, first.weight, first.append_eod) == ("a", 2.0, False)
    assert first.tokenizer == TokenizerIdentity.of(ByteTokenizer())
    assert (second.name, second.tokenizer, second.append_eod) == ("foreign", None, None)


def test_list() -> None:
    """Invalid lines, different tokenizers and invalid metadata are reported together."""
    metadata_path("b").write_text("{}", encoding="utf-8")
    Path("list").write_text("1 a\n0 n\n1 b\n1 nowhere\n", encoding="utf-8")
    assert found("--data-file-list list") == [
        "`list` line 2: the weight `0` is not above 0",
        "`--data-file-list list`: 1 of 4 datasets does not exist",
        "`b.meta.json` has no `tokenizer`",
        "`a` and `n` were not prepared with the same tokenizer",
    ]


def test_list_that_cannot_be_read() -> None:
    """It is a problem among others."""
    Path("list").write_bytes(b"\xff")
    assert found("--data-file-list list") == ["`list` is not UTF-8 text"]


def test_all_problems_of_a_list() -> None:
    """Invalid lines and weights, and datasets that are repeated or missing, come together."""
    Path("list").write_text("1 a\n0 nowhere\nx b\n1 a.bin\n1\n1 elsewhere\n", encoding="utf-8")
    _, problems = inspect_sources(load_config(["--data-file-list", "list"]).sources[0])
    assert [problem.what for problem in problems] == [
        "`list` line 2: the weight `0` is not above 0",
        "`list` line 3: `x` is not a weight",
        "`list` line 5 has 1 column",
        "`--data-file-list list` names `a` twice",
        "`--data-file-list list`: 2 of 4 datasets do not exist",
    ]
    assert "`nowhere.idx`, `elsewhere.idx`" in str(problems[-1].why)


def test_paths_relative_to_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset beside the list is used if the working directory has none of that path."""
    Path("lists").mkdir()
    _write("lists/b", ByteTokenizer())
    _write("lists/c", ByteTokenizer())
    list_path = Path("lists/list").absolute()
    list_path.write_text(f"1 a\n2 c\n3 b\n4 {list_path.parent}/d\n", encoding="utf-8")
    sources, (problem,) = inspect_sources(
        load_config(["--data-file-list", "lists/list"]).sources[0]
    )
    assert problem.what == "`--data-file-list lists/list`: 1 of 4 datasets does not exist"
    blend = sources.divided
    assert blend is not None
    assert [source.name for source in blend.sources][:3] == ["a", "lists/c", "b"]
    assert "`b` is the dataset of the working directory, not `lists/b`" in blend.note
    monkeypatch.chdir("lists")  # here both mean the same files
    sources, _ = inspect_sources(load_config(["--data-file-list", "list"]).sources[0])
    assert sources.divided is not None
    assert [source.name for source in sources.divided.sources][1:3] == ["c", "b"]
    assert not sources.divided.note


def test_one_dataset_by_two_paths() -> None:
    """A dataset that is listed by two paths is named twice."""
    Path("lists").mkdir()
    _write("lists/c", ByteTokenizer())
    Path("lists/list").write_text("1 lists/c\n2 c\n", encoding="utf-8")
    assert found("--data-file-list lists/list") == [
        "`--data-file-list lists/list` names `lists/c` twice"
    ]
