"""The flags of `lmcore data prepare` about formats and sentences, from the command line on."""

from __future__ import annotations

import json

import pytest

from lmcore.cli.main import main
from lmcore.data.indexed.dataset import IndexedDataset


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory to work in, without NLTK's data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NLTK_DATA", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def prepare(*flags: str) -> int:
    return main(
        ["data", "prepare", "--output-prefix", "out", "--tokenizer-type", "ByteTokenizer", *flags]
    )


def documents(prefix: str) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [bytes(dataset.get(i).tolist()).decode() for i in range(len(dataset))]


@pytest.mark.parametrize(
    "name, content, flags, expected",
    [
        ("x.csv", "id,text\n1,a\n2,b\n", [], ["a", "b"]),
        ("x.csv", "id;text\n1;a\n", ["--delim", ";"], ["a"]),
        ("x.dat", '1\t"a\n', ["--input-format", "tsv", "--no-header", "--text-key", "2"], ['"a']),
        ("x.tsv", 't\n"a\n"\n', ["--quotes", "--json-keys", "t"], ["a\n"]),
        ("x.csv", "t|u\na|b\n", ["--delim", "|", "--json-keys", "u"], ["b"]),
        ("x.csv", "t\tu\na\tb\n", ["--delim", "tab", "--json-keys", "u"], ["b"]),
        ("x.txt", "a\nb\n\nc", [], ["a\nb\n\nc"]),
        ("x.txt", "a\nb\n\nc", ["--document-per", "line"], ["a", "b", "c"]),
        ("x.txt", "a\nb\n\nc", ["--document-per", "paragraph"], ["a\nb", "c"]),
        ("x.json", '[{"text": "a"}, {"text": "b"}]', [], ["a", "b"]),
        ("x.json", '{"text": "a"}\n', ["--loose-json"], ["a"]),
        ("x.jsonl", '{"text": "a b\\nc"}\n', ["--presplit-sentences"], ["a b", "c"]),
        (
            "x.jsonl",
            '{"text": "It is. Dr. Smith is."}\n',
            ["--split-sentences", "--sentence-splitter", "sentencex", "--lang", "en"],
            ["It is.", "Dr. Smith is."],
        ),
    ],
)
def test_flags_reach_the_readers(here, capsys, name, content, flags, expected):
    """Each flag does what it says, from the file to the dataset."""
    (here / name).write_text(content)
    assert prepare("--input", name, "--json", *flags) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    level = "sentence" if any("sentences" in flag for flag in flags) else "document"
    assert output["prefix"] == f"out_{output['key']}_{level}"
    assert documents(output["prefix"]) == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--delim", "ab"], "`--delim ab` cannot separate fields"),
        (["--lang", "en"], "`--lang` needs `--split-sentences`"),
        (["--keep-newlines"], "`--keep-newlines` needs `--split-sentences`"),
        (["--presplit-sentences", "--lang", "en"], "`--lang` needs `--split-sentences`"),
        (["--presplit-sentences", "--split-sentences"], "exclude each other"),
        (["--split-sentences"], "no Punkt tables for `--lang english`"),
        (["--eval-text-key", "x"], "use `--json-keys KEY` in another command, for this text alone"),
        (["--input-format", "parket"], "parquet"),
        (["--max-document-mib", "0"], "--max-document-mib"),
        (["--document-per", "line"], "`--document-per line` cannot be combined with the input"),
        (["--delim", ";"], "`--delim` cannot be combined with the input"),
        (["--no-header"], "it is for a table, and `x.jsonl` is read as jsonl"),
        (["--quotes"], "`--quotes` cannot be combined with the input"),
        (
            ["--no-quotes", "--input-format", "text"],
            "`--no-quotes` cannot be combined with the input",
        ),
        (["--delim", ";", "--input-format", "parquet"], "`--input-format csv`"),
        (["--vocab-size", "5"], "cannot be combined with the tokenizer type `Byte"),
    ],
)
def test_flags_that_cannot_be_met_are_usage_errors(here, capsys, flags, message):
    """Conflicting flags and missing flags are reported before anything is read or written."""
    (here / "x.jsonl").write_text('{"text": "a"}\n')
    assert prepare("--input", "x.jsonl", *flags) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["x.jsonl"]


def test_flags_that_suit_one_file_of_several_are_taken(here):
    """Among files of several formats a flag need only concern one."""
    (here / "x.jsonl").write_text('{"text": "a"}\n')
    (here / "x.txt").write_text("b\nc")
    assert prepare("--input", "x.jsonl", "x.txt", "--document-per", "line") == 0
    assert documents("out_text_document") == ["a", "b", "c"]


def test_long_document_is_bounded_by_the_flag(here, capsys):
    """A line over `--max-document-mib` stops the run, or is skipped and counted."""
    long = json.dumps({"text": "y" * (1 << 20)})
    (here / "x.jsonl").write_text(f'{long}\n{{"text": "a"}}\n')
    assert prepare("--input", "x.jsonl", "--max-document-mib", "1") == 1
    assert "`x.jsonl` line 1: too long" in capsys.readouterr().err
    flags = ["--max-document-mib", "1", "--on-error", "skip", "--json"]
    assert prepare("--input", "x.jsonl", *flags) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {"too long": 1}
    assert documents("out_text_document") == ["a"]
