"""The commands of the plugin: named as in the core's table, and careful with existing output."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.commands import known_inner
from lmcore.cli.data import run
from lmcore.cli.main import main
from lmcore.plugin import discover
from lmcore.plugin.registrations import plugin_commands
from lmcore_data_tools.clean.command import CleanSection
from lmcore_data_tools.tokenizer_training.command import TrainTokenizerSection

CLEAN = [
    "clean",
    "exact",
    "--input",
    "a.jsonl",
    "--output",
    "out.jsonl",
    "--dropped",
    "out.dropped",
]
TRAIN = ["train-tokenizer", "--input", "a.jsonl", "--output-dir", "out", "--vocab-size", "258"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a corpus."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{i} {i}"}) for i in range(3)]
    Path("a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the content of the output files by name."""
    return {str(path): path.read_bytes() for path in folder.rglob("out*") if path.is_file()}


def test_the_core_names_the_same_commands() -> None:
    """The core's table has the names and summaries that the plugin adds."""
    found = plugin_commands(discover(probe=False))
    own = [one for one in known_inner("data").values() if one.package == "lmcore-data-tools"]
    assert [one.name for one in own] == ["data clean", "data train-tokenizer"]
    for one in own:
        assert found[one.name].summary == one.summary


def test_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed where they were, without a note; each has its help."""
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  clean       Clean a corpus with a chain of steps.\n" in out
    assert "needs lmcore" not in out
    for name, word in (("clean", "--dropped"), ("train-tokenizer", "--vocab-size")):
        assert main(["data", name, "--help"]) == 0
        assert word in capsys.readouterr().out


def test_without_the_plugin_they_say_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the package and the extra."""
    cpu = discover(env={"LMCORE_PLUGINS": ""}, probe=False)
    alone = dataclasses.replace(cpu, records=tuple(one for one in cpu if one.name == "cpu"))
    monkeypatch.setattr("lmcore.cli.plugin_commands.discover", lambda **_: alone)
    monkeypatch.setattr("lmcore.model.installation.sources", lambda: None)
    assert main(["data", *CLEAN]) == 2
    err = capsys.readouterr().err
    assert "error: `lmcore data clean` is not available" in err
    assert "why: the package `lmcore-data-tools`, which adds it, is not installed" in err
    assert 'hint: run `pip install "lmcore[data]"`' in err


@pytest.mark.parametrize("command", [CLEAN, TRAIN], ids=["clean", "train-tokenizer"])
def test_second_run_changes_nothing(command: list[str], folder: Path) -> None:
    """The second run of a command ends with status 2 and names the file and the way on."""
    section = CleanSection if command is CLEAN else TrainTokenizerSection
    replaces = "overwrite" in {field.name for field in dataclasses.fields(section)}
    assert replaces == (command is CLEAN)
    assert run(command) == 0
    for path in [*folder.glob("out*"), *folder.glob("out/*")]:
        if path.is_file():
            path.write_bytes(path.read_bytes() + b" mine")
    before = outputs(folder)
    with pytest.raises(ConfigError) as caught:
        run(command)
    assert "out" in caught.value.what
    assert "exists already" in caught.value.what
    assert ("--overwrite" in str(caught.value.hint)) == replaces
    assert outputs(folder) == before


def test_overwrite(folder: Path) -> None:
    """With `--overwrite` the second run writes what the first one did."""
    assert run(CLEAN) == 0
    before = outputs(folder)
    for path in folder.glob("out*"):
        path.write_bytes(b"mine")
    assert run([*CLEAN, "--overwrite"]) == 0
    assert outputs(folder) == before


@pytest.mark.parametrize("kind", ["not a regular file", "a directory"])
def test_no_pipe_is_replaced(kind: str) -> None:
    """A pipe, a device or a directory is not replaced by a file, with `--overwrite` either."""
    path = Path("special.jsonl")
    path.mkdir() if kind == "a directory" else os.mkfifo(path)
    with pytest.raises(ConfigError, match=kind):
        run([*CLEAN[:-3], str(path), "--overwrite"])
    assert not path.is_file()


@pytest.mark.parametrize(
    "command",
    [
        "clean exact --output clean.jsonl",
        "train-tokenizer --output-dir new --vocab-size 300",
    ],
)
def test_a_log_gets_progress_by_time(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fast command writes no progress line into a log, a slow one a line every ten seconds."""
    corpus = folder / "a.jsonl"
    corpus.write_text("".join(f'{{"text": "a document, {i}"}}\n' for i in range(3000)), "utf-8")
    argv = [*command.split(), "--input", str(corpus)]
    assert run(argv) == 0
    assert not _progress(capsys.readouterr().err)
    for path in folder.iterdir():
        if path != corpus:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    clock = itertools.count(step=6)
    monkeypatch.setattr("lmcore.cli.text.progress.time", SimpleNamespace(monotonic=clock.__next__))
    assert run(argv) == 0
    assert len(_progress(capsys.readouterr().err)) == (next(clock) // 6 - 1) // 2


def _progress(text: str) -> list[str]:
    return [line for line in text.splitlines() if "ocuments" in line and "training on" not in line]


def test_clean_refuses_flags_of_another_format(capsys: pytest.CaptureFixture[str]) -> None:
    """`lmcore data clean` reads as `prepare` does, and refuses alike, a size without use too."""
    clean = ["data", "clean", "length", "--input", "a.jsonl", "--output", "y.jsonl"]
    assert main([*clean, "--min-characters", "1", "--document-per", "line", "--no-header"]) == 2
    told = capsys.readouterr().err
    assert "`--document-per line` cannot be combined" in told
    assert "`--no-header` cannot be combined" in told
    assert main([*clean, "--tokenizer-type", "ByteTokenizer", "--vocab-size", "5"]) == 2
    assert "`--vocab-size 5` cannot be combined" in capsys.readouterr().err
    assert not Path("y.jsonl").exists()
