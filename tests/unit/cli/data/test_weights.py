"""`lmcore data weights` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.data import run
from lmcore.data.blend.file_list import read_data_file_list
from lmcore.data.indexed.writer import IndexedDatasetWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two datasets of `wiki` and one of `c4`, of 1, 3 and 4 tokens."""
    for name, count in (("wiki-0", 1), ("wiki-1", 3), ("c4-0", 4)):
        with IndexedDatasetWriter(tmp_path / "data" / name, "uint16") as writer:
            writer.add_document(range(count))
    (tmp_path / "epochs").write_text("wiki 3\nc4 1\n")
    return tmp_path


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list goes to standard output, its weights as computed by hand."""
    assert run(["weights", "--input", f"{folder}/data", "--epochs", f"{folder}/epochs"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(float(row[0]), row[1], row[2]) for row in rows] == [
        (4 / 16, f"{folder}/data/c4-0", "c4"),
        (3 / 16, f"{folder}/data/wiki-0", "wiki"),
        (9 / 16, f"{folder}/data/wiki-1", "wiki"),
    ]


def test_two_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are kept in a file, and a list made from it elsewhere, with the new directory."""
    counts, listed = folder / "counts.json", folder / "train.list"
    assert (
        run(
            [
                "weights",
                "--datasets",
                f"{folder}/data/wiki-0",
                f"{folder}/data/c4-0.idx",
                "--metadata-output",
                str(counts),
                "--json",
            ]
        )
        == 0
    )
    assert [row["weight"] for row in json.loads(capsys.readouterr().out)] == [0.2, 0.8]
    moved = ["--rebase", f"{folder}/data", "/fast"]
    assert run(["weights", "--metadata", str(counts), *moved, "--output", str(listed)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 datasets of 2 corpora, 5 tokens" in captured.err
    assert [file.path for file in read_data_file_list(listed)[0]] == ["/fast/wiki-0", "/fast/c4-0"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "is required"),
        (["--metadata", "x", "--input", "y"], "excludes"),
        (["--metadata", "x", "--rebase", "a"], "has 1 directory"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    """Flags that do not go together are refused."""
    with pytest.raises(ConfigError, match=message):
        run(["weights", *flags])


def test_errors_write_nothing(folder: Path) -> None:
    """No file is left if a corpus lacks its epochs, or if the output cannot be written."""
    (folder / "epochs").write_text("wiki 1\n")
    out = ["--output", f"{folder}/list", "--metadata-output", f"{folder}/counts"]
    data = ["weights", "--input", f"{folder}/data"]
    with pytest.raises(DataError, match="no epochs for the corpus `c4`"):
        run([*data, "--epochs", f"{folder}/epochs", *out])
    with pytest.raises(DataError, match="cannot write"):
        run([*data, "--output", f"{folder}/none/list"])
    assert {path.name for path in folder.iterdir()} == {"data", "epochs"}
