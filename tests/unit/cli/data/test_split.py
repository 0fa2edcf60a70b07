"""`lmcore data merge` and `lmcore data split` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.data import run
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two datasets of three documents each, and ten JSON lines."""
    for name in "ab":
        with IndexedDatasetWriter(tmp_path / "data" / name, "uint16") as writer:
            for token in range(3):
                writer.add_document([token])
    lines = [json.dumps({"text": str(i)}) for i in range(10)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_merge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory's datasets and named ones are merged alike, and the next command is shown."""
    assert run(["merge", "--input", f"{folder}/data", "--output-prefix", f"{folder}/one"]) == 0
    captured = capsys.readouterr().out
    assert "2 datasets, 6 documents, 6 tokens of uint16" in captured
    # Without a record of the tokenizer no run takes it.
    assert f"next: lmcore data inspect {folder}/one\n" in captured
    named = [f"{folder}/data/a.idx", f"{folder}/data/b.bin"]
    run(["merge", "--datasets", *named, "--output-prefix", f"{folder}/two", "--json"])
    assert json.loads(capsys.readouterr().out)["documents"] == 6
    assert (folder / "one.idx").read_bytes() == (folder / "two.idx").read_bytes()


@pytest.mark.parametrize(
    "flags, message",
    [([], "`--datasets` or `--input` is required"), (["--datasets", "a", "--input", "b"], "exclu")],
)
def test_merge_wants_one_kind(flags: list[str], message: str) -> None:
    """Datasets are named or their directory is, not both and not neither."""
    with pytest.raises(ConfigError, match=message):
        run(["merge", "--output-prefix", "x", *flags])


def test_split_data_sets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of four documents and of what is left."""
    flags = ["--output-prefix", f"{folder}/out", "--samples", "4"]
    assert run(["split", "--input", f"{folder}/data", *flags]) == 0
    assert "6 documents of 2 datasets" in capsys.readouterr().out
    assert [IndexedDataset(folder / f"out-0000{i}").document_count for i in range(2)] == [4, 2]


def test_split_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Underscores in the flags, as the script of old has them, are understood."""
    flags = ["--output_dir", f"{folder}/out", "--test_percent", "0.2", "0.1", "--json"]
    assert run(["split", "--input_files", f"{folder}/web.jsonl", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [part["lines"] for part in report["parts"]] == [7, 2, 1]
    flags[1] = f"{folder}/other"
    assert run(["split", "--input-files", f"{folder}/web.jsonl", *flags[:-1]]) == 0
    first, *parts = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert first.startswith("10 lines of 1 file in ")
    assert [part.split(" ", 1)[1] for part in parts] == ["7 lines", "2 lines", "1 line"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "is required"),
        (["--datasets", "a"], "`--output-prefix` is required"),
        (["--datasets", "a", "--input-files", "b"], "exclude each other"),
        (["--datasets", "a", "--input", "b", "--output-prefix", "c", "--samples", "1"], "exclude"),
        (["--datasets", "a", "--output-prefix", "b", "--samples", "0"], "out of range"),
        (["--input-files", "a", "--output-dir", "b"], "`--test-percent` is required"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    """Flags that do not go together, or are missing, are refused."""
    with pytest.raises(ConfigError) as caught:
        run(["split", *flags])
    assert message in caught.value.render()
