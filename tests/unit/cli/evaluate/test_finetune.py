"""`lmcore evaluate --finetune`: checkpoints that it cannot begin from, and stops of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import ConfigError, DataError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli import train
from lmcore.cli.evaluate import run
from lmcore.cli.evaluate.finetune import _check_processes, _compare
from lmcore.cli.evaluate.runs import TunedData, TunedRun
from lmcore.cli.evaluate.scores import _files
from lmcore.evaluation.finetune import TUNED
from lmcore.evaluation.finetune.record import PARTS, Part
from lmcore.model.family import family_of
from lmcore.model.shape import ModelShape


def test_a_family_without_heads(tmp_path: Path) -> None:
    """The message names the family, and no flag that the user did not give."""
    settings = ModelShape(2, 24, 3, 40, 64, 384, model_family="t5")
    shape = settings.to_dict() | dict(family_of(settings).settings)
    tensors = {"a": torch.zeros(1)}
    save_checkpoint(tmp_path / "t5/checkpoints", 5, tensors, {}, model_shape=shape)
    words = f"{tmp_path}/t5 --task mnli --finetune --save {tmp_path}/a --task-data {tmp_path}"
    with pytest.raises(ConfigError, match="is a T5 model, which `--finetune` cannot") as found:
        run(words.split())
    assert "--task classification" not in found.value.render()


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's processes, which do not have torchrun's variables, would each train a model."""
    variables = "STEP_ID=0 PROCID=1 LOCALID=1 NNODES=1 NODEID=0 JOB_ID=1 STEP_NODELIST=localhost"
    variables += " STEP_NUM_TASKS=2 NTASKS=2 STEP_TASKS_PER_NODE=2"
    for one in variables.split():
        name, _, value = one.partition("=")
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ConfigError, match="`--finetune` was started by a launcher"):
        _check_processes([])


QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\tb\t1\n4\t5\t6\tonly\n"
TASKS = {task.name: task for task in TUNED}


def qqp(folder: Path, **content: str) -> dict[Part, list[Path]]:
    """Write files of QQP, with a row that is left out, but for what is given."""
    found: dict[Part, list[Path]] = {}
    for part in PARTS:
        found[part] = [folder / f"{part}.tsv"]
        found[part][0].write_text(content.get(part, QQP))
    return found


def test_each_file_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With several seeds, too: the rows that are left out are said once."""
    data = TunedData(TASKS["qqp"], qqp(tmp_path), tmp_path / "data")
    first = data.written()
    assert data.written() == first
    assert first[1] == 1
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in messages] == [
        f"`{tmp_path / name}.tsv`" for name in ("valid", "test", "train")
    ]


@pytest.mark.parametrize("part", ["valid", "test"])
@pytest.mark.parametrize(
    "content,message",
    [
        ("", "is empty"),
        (QQP.splitlines()[0], "has no rows of the task `qqp`"),
        (QQP + "1\t2\t3\ta\tb\t7\n", "line 4 of .* has a label outside the set"),
        (QQP.replace("\tis_duplicate", "").replace("\t1\n", "\n"), "has no labels"),
    ],
)
def test_files_of_scores_are_read_before_training(
    tmp_path: Path, part: str, content: str, message: str
) -> None:
    """A wrong file of the test ends no training of hours."""
    with pytest.raises(DataError, match=message) as caught:
        TunedData(TASKS["qqp"], qqp(tmp_path, **{part: content}), tmp_path / "data")
    assert caught.value.exit_status == 1
    if message == "has no labels":
        assert "names no column `is_duplicate`" in str(caught.value.why)


def test_files_of_a_trained_head(tmp_path: Path) -> None:
    """They are read before the model is loaded; only predictions need no labels."""
    task, (path,) = TASKS["qqp"], qqp(tmp_path)["valid"]
    unlabelled = QQP.replace("\tis_duplicate", "").replace("\t1\n", "\n")
    (read,) = _files(task, path, None, predicts=False)[""]
    assert len(read.rows) == 1
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        _files(task, path, None, predicts=True)
    with pytest.raises(DataError, match=r"there is no `.*nothing.tsv`"):
        _files(task, tmp_path / "nothing.tsv", None, predicts=True)
    for name in ("dev", "test"):
        (tmp_path / f"{name}.tsv").write_text(unlabelled)
    for place in (tmp_path / "dev.tsv", tmp_path):
        with pytest.raises(ConfigError, match="no labels in") as caught:
            _files(task, place, None, predicts=False)
        assert "`--examples FILE`" in str(caught.value.hint)
    found = _files(task, tmp_path, None, predicts=True)
    assert {part: len(files) for part, files in found.items()} == {"valid": 1, "test": 1}


@pytest.mark.parametrize(
    "ending,status",
    [
        ("received SIGINT", 130),
        ("received SIGTERM", 143),
        ("reached --exit-interval", 1),
        ("received several signals", 1),
        (None, 1),
    ],
)
def test_status_of_a_stopped_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str | None, status: int
) -> None:
    """Training that saves and ends at a signal has status 0; the fine-tuning is not complete."""
    if ending is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"status": ending}))
    monkeypatch.setattr(train, "run", lambda _argv: 0)
    monkeypatch.setattr(TunedRun, "_arguments", lambda _self: [])
    unused: Any = None
    tuned = TunedRun(unused, unused, unused, 1, tmp_path, unused, unused, unused)
    assert tuned.train_and_score() == (status, None)


def test_changed_flags_of_training_are_named() -> None:
    """Long lists are not shown: what differs is."""
    same = [f"--flag-{number}" for number in range(40)]
    saved: dict[str, Any] = {"training": [*same, "--recompute", "full", "--lr", "1"], "epochs": 1}
    wanted: dict[str, Any] = {"training": [*same, "--lr", "2"], "epochs": 3}
    with pytest.raises(ConfigError, match="has a fine-tuning with other settings") as caught:
        _compare(saved, wanted, Path("runs"))
    why = str(caught.value.why)
    assert "it was with --lr 1 --recompute full, now with --lr 2" in why
    assert "`epochs` was 1, and is 3" in why
    assert "--flag-1" not in why
    with pytest.raises(ConfigError) as caught:
        _compare({"training": ["--a", "--b"]}, {"training": ["--b", "--a"]}, Path("runs"))
    assert "another order" in str(caught.value.why)
