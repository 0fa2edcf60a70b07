"""`--save-best` and `--early-stop`: by the validation loss, over several starts."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcore.checkpoint import read_manifest
from lmcore.cli.main import main
from lmcore.train.validation import Evaluator, Validation

LOSSES = {2: 5.0, 4: 3.0, 6: 3.5, 8: 2.95, 10: 4.0, 12: 4.0, 14: 1.0}
FLAGS = (
    "--train-iters 16 --eval-iters 1 --eval-interval 2 --split 80,20,0 --save-best"
    " --save-interval 6 --keep-last 1 --early-stop 3 --early-stop-delta 0.1"
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each validation has the loss of `LOSSES`."""

    def evaluate(self: Evaluator, samples: Any, first: int) -> Validation | None:
        number = first // (self._plan.global_batch_size * self._plan.config.training.eval_iters)
        return (
            None if samples is None else Validation({"lm_loss": LOSSES.get(2 * number + 2, 9.0)}, 4)
        )

    monkeypatch.setattr(Evaluator, "_evaluate", evaluate)


@pytest.fixture
def go_on() -> Callable[..., tuple[int, str, str]]:
    """Runs `lmcore train --continue`; returns status, output and messages."""

    def go(directory: Path, *flags: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["train", "--continue", str(directory), *flags])
        return status, out.getvalue(), err.getvalue()

    return go


def steps_of(run: Any) -> list[int]:
    """Return the steps of the checkpoints."""
    return sorted(int(one.name[5:]) for one in (run.directory / "checkpoints").glob("iter_*"))


@pytest.mark.usefixtures("measured")
def test_an_early_stop(train: Any, go_on: Any, capsys: Any) -> None:
    """It counts over a restart, keeps the best checkpoint, and is not begun again."""
    first = train("run", f"{FLAGS} --exit-interval 5")
    assert first.status == 0, first.err
    assert steps_of(first) == [4, 5]
    status, out, _ = go_on(first.directory, "--exit-interval", "none")
    assert status == 0
    # 2.95 at step 8 is the best, but does not improve 3.0 by 0.1: 6, 8 and 10 are three.
    assert first.summary["status"].startswith("stopped early: 3 validations")
    assert first.summary["iteration"] == 10
    assert (first.summary["best_valid_loss"], first.summary["best_valid_step"]) == (2.95, 8)
    assert steps_of(first) == [8, 10]
    assert f"lmcore train --continue {first.directory} --early-stop none\n" in out
    assert "best validation loss 2.9500, at step 8" in out
    before = json.dumps(first.summary)
    status, out, _ = go_on(first.directory)
    assert status == 0
    assert "stopped early at step 10; nothing changed" in out
    assert json.dumps(first.summary) == before
    argv = ["generate", "--load", str(first.directory), "--tokens", "1", "--ckpt-step", "best"]
    assert main(argv) == 0
    assert "iter_0000008" in capsys.readouterr().err
    assert go_on(first.directory, "--early-stop", "none")[0] == 0
    assert first.summary["status"] == "completed"
    assert first.summary["best_valid_step"] == 14
    assert steps_of(first) == [14, 16]


@pytest.mark.full
@pytest.mark.usefixtures("measured")
def test_back_to_the_best(train: Any, go_on: Any) -> None:
    """A run that continues from the best checkpoint has its history, and marks the next best."""
    run = train("run", f"{FLAGS} --exit-interval 10")
    status, _, err = go_on(run.directory, "--ckpt-step", "best", "--exit-interval", "none")
    assert status == 0, err
    assert "from step 8" in err.replace("\n", " ")
    manifest = read_manifest(run.directory / "checkpoints/iter_0000010")
    assert manifest.meta["validation"]["best_step"] == 8
    assert "best" not in manifest.meta
    assert read_manifest(run.directory / "checkpoints/iter_0000008").meta["best"] is True
