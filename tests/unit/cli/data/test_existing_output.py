"""Existing output of every `lmcore data` command: refused, and replaced only as asked for."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli import data
from lmcore.cli.commands import known_inner

BYTES = ["prepare", "--output-prefix", "out", "--tokenizer-type", "ByteTokenizer"]
PREPARE = [*BYTES, "--input", "a.jsonl"]
NULL = [*PREPARE[:-3], "NullTokenizer", "--vocab-size", "9", "--input", "a.jsonl"]
MERGE = ["merge", "--datasets", "one_text_document", "--output-prefix", "out_text_document"]

COMMANDS = {
    name: [name, *flags.split()]
    for name, flags in {
        "prepare": " ".join(PREPARE[1:]),
        "merge": " ".join(MERGE[1:]),
        "weights": "--datasets one_text_document --output out.list --metadata-output out.json",
        "split": "--datasets one_text_document --output-prefix out --samples 1",
        "repair": "one_text_document --output-prefix out",
    }.items()
}
READ_ONLY = {"inspect", "corpora"}
NEVER_REPLACED = {"split", "repair"}
CONTINUED = {"retro"}
"""Commands whose second run continues what is there; `test_retro.py` has their cases."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a corpus and a dataset."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{i} {i}"}) for i in range(3)]
    Path("a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert data.run([*PREPARE[:1], "--output-prefix", "one", *PREPARE[3:]]) == 0
    return tmp_path


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the content of the output files by name."""
    return {str(path): path.read_bytes() for path in folder.rglob("out*") if path.is_file()}


def test_every_command_has_a_case() -> None:
    """A command added later is tested here, too; all that can replace take `--overwrite`."""
    assert COMMANDS.keys() | READ_ONLY | CONTINUED == {
        name for name, one in known_inner("data").items() if one.load
    }
    for name in COMMANDS:
        module = importlib.import_module(f"lmcore.cli.data.{name}")
        (section,) = {getattr(module, one) for one in dir(module) if one.endswith("Section")} - {
            getattr(module, one, None) for one in ("TokenizerSection", "InputSection")
        }
        fields = {field.name for field in dataclasses.fields(section)}
        assert ("overwrite" in fields) == (name not in NEVER_REPLACED), name


@pytest.mark.parametrize("name", COMMANDS)
def test_second_run_changes_nothing(name: str, folder: Path) -> None:
    """The second run of a command ends with status 2 and names the file and the way on."""
    command = COMMANDS[name]
    assert data.run(command) == 0
    for path in folder.glob("out*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b" mine")
    before = outputs(folder)
    assert before
    with pytest.raises(ConfigError) as caught:
        data.run(command)
    assert "out" in caught.value.what
    assert "exists already" in caught.value.what
    assert ("--overwrite" in str(caught.value.hint)) == (name not in NEVER_REPLACED)
    assert outputs(folder) == before


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NEVER_REPLACED))
def test_overwrite(name: str, folder: Path) -> None:
    """With `--overwrite` the second run writes what the first one did."""
    assert data.run(COMMANDS[name]) == 0
    before = outputs(folder)
    for path in folder.glob("out*[!n]"):  # the metadata stays valid
        path.write_bytes(b"mine")
    assert data.run([*COMMANDS[name], "--overwrite"]) == 0
    assert outputs(folder) == before


@pytest.mark.parametrize("command", [NULL, MERGE])
def test_dataset_of_another_tokenizer_is_never_replaced(command: list[str], folder: Path) -> None:
    """`--overwrite` replaces no dataset of another tokenizer, until its files are removed."""
    other = NULL if command is MERGE else PREPARE
    Path("a.jsonl").write_text('{"text": "1 2 3"}', encoding="utf-8")
    assert data.run(other) == 0
    before = outputs(folder)
    with pytest.raises(
        ConfigError, match="`out_text_document` was prepared with another"
    ) as caught:
        data.run([*command, "--overwrite"])
    assert "NullTokenizer" in str(caught.value.why)
    assert "ByteTokenizer" in str(caught.value.why)
    assert outputs(folder) == before
    for path in before:
        assert path.endswith(("bin", "idx", "meta.json"))
        Path(path).unlink()
    assert data.run(command) == 0


def test_join_of_partitions(folder: Path) -> None:
    """Partitions and their join follow the rule, too."""
    Path("b.jsonl").write_text('{"text": "b"}', encoding="utf-8")
    shared = [*BYTES, "--input", "a.jsonl", "b.jsonl", "--partitions", "2"]
    for number in "01":
        assert data.run([*shared, "--partition", number]) == 0
    with pytest.raises(ConfigError, match=r"out\.0-of-2_text_document\.bin` exists already"):
        data.run([*shared, "--partition", "0"])
    assert data.run([*shared, "--join-partitions"]) == 0
    before = outputs(folder)
    with pytest.raises(ConfigError, match=r"out_text_document\.bin` exists already"):
        data.run([*shared, "--join-partitions"])
    assert outputs(folder) == before
    assert data.run([*shared, "--join-partitions", "--overwrite"]) == 0
