"""Files that `lmcore evaluate` replaces: its own, but no input and no other program's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, RunError
from lmcore.cli.evaluate.outputs import check_outputs, check_replaced, note_replaced, write_results
from lmcore.cli.evaluate.scores import require_outputs
from lmcore.cli.evaluate.section import EvaluateSection

RECORD = json.dumps({"checkpoint": "a", "task": "mine", "example": 0})
RESULTS = {"run": {"mine": {"examples": 1, "metrics": {}}}}


@pytest.mark.parametrize("flag", ["--output", "--examples"])
def test_a_file_that_is_read_is_refused(tmp_path: Path, flag: str) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text(RECORD)
    given = str(tmp_path / "." / "own.jsonl")
    output, examples = (given, None) if flag == "--output" else (None, given)
    with pytest.raises(ConfigError, match=f"`{flag} .*` is a file that the evaluation reads"):
        check_outputs(output, examples, [tmp_path / "other", data])


@pytest.mark.parametrize(
    "content,refused",
    [
        ("", False),
        (RECORD + "\n", False),
        ('{"text": "It is."}\n', True),
        ("notes\n", True),
        ("[]\n", True),
        ("\0\xff", True),
    ],
)
def test_examples_replace_examples_alone(tmp_path: Path, content: str, refused: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="latin-1")
    if refused:
        with pytest.raises(ConfigError, match="has no examples of `lmcore evaluate`"):
            check_replaced(None, str(path))
    else:
        check_replaced(None, str(path))
    assert path.read_text(encoding="latin-1") == content
    check_replaced(None, str(tmp_path / "new.jsonl"))


@pytest.mark.parametrize(
    "checkpoints,tasks,lost",
    [
        (["run"], ["mine"], False),
        (["run", "other"], ["mine", "lambada"], False),
        (["run"], ["lambada"], True),
        (["other"], ["mine"], True),
        (["run"], None, False),
    ],
)
def test_results_of_another_evaluation_are_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    checkpoints: list[str],
    tasks: list[str] | None,
    lost: bool,
) -> None:
    path = tmp_path / "a.json"
    note_replaced(str(path), checkpoints, tasks)
    path.write_text(json.dumps(RESULTS))
    note_replaced(str(path), checkpoints, tasks)
    assert (
        "results of another evaluation, which are replaced: `mine` of `run`" in caplog.text
    ) is (lost)


@pytest.mark.parametrize("content", ["notes\n", "", "{}", '{"task": "mnli", "checkpoint": "a"}'])
def test_results_replace_results_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="has no results of `lmcore evaluate`"):
        check_replaced(str(path), None)
    assert path.read_text() == content


def test_results_of_a_fine_tuning_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"task": "mnli", "checkpoint": "a", "seeds": {}, "best": "b"}))
    check_replaced(str(path), None)


def test_a_device_is_no_file_of_another_program() -> None:
    check_replaced("/dev/null", "/dev/null")


@pytest.mark.parametrize("flag", ["output", "examples"])
def test_data_of_heads_is_not_replaced(tmp_path: Path, flag: str) -> None:
    """Also a file of a folder that is read, as of RACE."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/1.txt").write_text("{}")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood\t1\n")
    inputs = [tmp_path / "dev", tmp_path / "dev.tsv"]
    for path in (tmp_path / "dev/1.txt", tmp_path / "dev.tsv"):
        section = dataclasses.replace(EvaluateSection(), **{flag: str(path)})
        with pytest.raises(ConfigError, match="is a file that the evaluation reads"):
            require_outputs(section, inputs)
    (tmp_path / "notes").write_text("notes")
    section = dataclasses.replace(EvaluateSection(), **{flag: str(tmp_path / "notes")})
    with pytest.raises(ConfigError, match=r"has no (results|examples) of `lmcore"):
        require_outputs(section, inputs)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's /dev/full")
def test_results_on_a_full_disk() -> None:
    with pytest.raises(RunError, match="cannot write `/dev/full`") as raised:
        write_results(Path("/dev/full"), "{}")
    assert raised.value.why == "No space left on device"
