"""Nearest existing paths in hints: of the function, and of every command that reads files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lmcore.base.missing_path import missing_path_hint
from lmcore.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in ("data/book.txt", "web.jsonl.gz", "web_text_document.idx", "web_text_document.bin"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"")
    for name in ("vocab.json", "labels.csv", "run.yaml", "list.txt", "script.sh", "prompt.txt"):
        Path(name).write_text("{}\n")


@pytest.mark.parametrize(
    "given, meant",
    [
        ("data/bok.txt", "data/book.txt"),
        ("dtaa/book.txt", "data/book.txt"),  # what follows the wrong name is there
        ("WEB.jsonl.gz", "web.jsonl.gz"),
        ("web.jsonl", "web.jsonl.gz"),
        ("data/whale.txt", None),
        ("dtaa/whale.txt", None),
        ("data/book.txt", None),  # it is there: the fault is another
        ("no/such/thing", None),
        ("", None),
    ],
)
def test_hint(given: str, meant: str | None) -> None:
    """A slip of letters, or a missing ending, in any part of the path."""
    hint = missing_path_hint(given)
    assert hint == (f"did you mean `{meant}`?" if meant else "check the path")


def test_absolute_path(tmp_path: Path) -> None:
    """The suggestion is given as the path was."""
    found = missing_path_hint(f"{tmp_path}/dat/book.txt")
    assert found == f"did you mean `{tmp_path}/data/book.txt`?"


PREPARE = "data prepare --output-prefix out --tokenizer-type ByteTokenizer"
TRAIN = "train --device cpu --train-iters 1"


@pytest.mark.parametrize(
    "command, meant",
    [
        (f"{PREPARE} --input data/bok.txt", "data/book.txt"),
        (f"{PREPARE} --input dat", "data"),
        ("data corpora --corpora rum.yaml", "run.yaml"),
        ("data inspect wb_text_document", "web_text_document"),
        ("data repair wb_text_document", "web_text_document"),
        (f"{TRAIN} --train-data ./data/bok.txt", "data/book.txt"),
        (f"{TRAIN} --data-path wb_text_document", "--data-path web_text_document"),
        (f"{TRAIN} --data-file-list lists.txt", "list.txt"),
        (f"{TRAIN} --vocab-file vocabs.json --merge-file vocab.json", "vocab.json"),
        (f"{TRAIN} --task classification --task-data label.csv", "labels.csv"),
        (f"{TRAIN} runs.yaml", "run.yaml"),
        ("launch local --profile runs.yaml train", "run.yaml"),
        ("launch hostfile --hostfile lists.txt train", "list.txt"),
        ("migrate scripts.sh", "script.sh"),
    ],
)
def test_commands(command: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that reads a file names the nearest one where there is none."""
    assert main(shlex.split(command)) != 0
    assert f"did you mean `{meant}`?" in capsys.readouterr().err
