"""Files that `lmcore evaluate` replaces: its own, but no input and no other program's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.evaluate.outputs import check_outputs, check_replaced, note_replaced

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
