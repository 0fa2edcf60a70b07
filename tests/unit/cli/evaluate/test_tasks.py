"""Tasks that `lmcore evaluate` is asked for: a checkpoint's flag, and the list."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.evaluate import run
from lmcore.cli.evaluate.scores import score_heads
from lmcore.cli.evaluate.section import EvaluateSection
from lmcore.evaluation.chosen import named_tasks
from lmcore.evaluation.files import find_files
from lmcore.evaluation.task import Task
from lmcore.evaluation.tasks import TASKS
from lmcore.evaluation.tasks.language import plain_text


@pytest.mark.parametrize(
    "line,message,hint",
    [
        ("--task GLUE --load X", "there is no task `GLUE`", ""),
        (
            "--task wikitext103_stream --task-data D --load X",
            "`--load X`: a checkpoint is given without a flag",
            "lmcore evaluate X --task wikitext103_stream",
        ),
        ("--task mnli --load=X", "`--load X`: a checkpoint", "lmcore evaluate X --task mnli"),
        ("--text a.txt --load X", "`--load X`: a checkpoint", "lmcore evaluate X"),
    ],
)
def test_a_checkpoint_by_a_flag(line: str, message: str, hint: str) -> None:
    """An unknown task comes first; of a known one the hint has the command without the flag."""
    with pytest.raises(ConfigError) as caught:
        run(line.split())
    assert caught.value.what.startswith(message)
    assert hint in str(caught.value.hint)


def test_each_name_has_a_space_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (stream,) = [line for line in lines if line.startswith("wikitext103_stream")]
    assert stream.split()[:2] == ["wikitext103_stream", "Perplexity"]
    (patterns,) = [line for line in lines if "hellaswag_val*.jsonl" in line]
    assert "files: hellaswag_val*.jsonl, hellaswag*.jsonl, of the release" in patterns


@pytest.mark.parametrize(
    "name,what,hint",
    [
        ("mnli", "the task `mnli` needs a head", "--task mnli --finetune"),
        ("nq", "the task `nq` needs an index", "--task nq --index DIR"),
        ("NQ", "there is no task `NQ`", "--task nq --index DIR"),
        ("mnly", "there is no task `mnly`", "did you mean `mnli`?"),
        ("lambda", "there is no task `lambda`", "did you mean `lambada`?"),
    ],
)
def test_a_task_that_is_scored_in_another_way(name: str, what: str, hint: str) -> None:
    """`lmcore train --eval-tasks` and `--list` ask for these, too."""
    with pytest.raises(ConfigError) as caught:
        named_tasks([name], TASKS)
    assert caught.value.what.startswith(what)
    assert hint in str(caught.value.hint)


def test_a_directory_as_text(tmp_path: Path) -> None:
    text = Task("text", "A text.", (), plain_text, ("loss",), "you")
    with pytest.raises(DataError, match="is a directory"):
        find_files(text, tmp_path)
    with pytest.raises(DataError, match="there is no file"):
        find_files(text, tmp_path / "absent")


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_head_is_scored_by_whole_models(axis: str) -> None:
    unused = cast("Any", None)
    section = EvaluateSection(**{f"{axis}_model_parallel_size": 2})
    with pytest.raises(ConfigError, match="a head is scored by whole models") as caught:
        score_heads(section, [], unused, unused, [])
    assert "`--nproc-per-node N` starts N replicas" in str(caught.value.hint)
