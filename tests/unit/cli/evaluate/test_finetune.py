"""`lmcore evaluate --finetune`: checkpoints that it cannot begin from, and stops of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli import train
from lmcore.cli.evaluate import run
from lmcore.cli.evaluate.finetune import _compare
from lmcore.cli.evaluate.runs import TunedRun
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
    tuned = TunedRun(unused, unused, unused, 1, tmp_path, tmp_path, unused, unused)
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
