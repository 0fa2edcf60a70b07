"""The command that continues a run that was ended by an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcore.checkpoint import save_checkpoint
from lmcore.train.resume.ended import ResumeHint


def save(run: Path, step: int) -> Path:
    tensors = {"w": torch.ones(2)}
    return save_checkpoint(run / "checkpoints", step, tensors, {}, model_shape={})


def test_nothing_to_continue_from(tmp_path: Path) -> None:
    assert ResumeHint(None, None).line(tmp_path / "absent") is None
    (tmp_path / "checkpoints").mkdir()
    assert ResumeHint(tmp_path, None).line(tmp_path) is None
    (save(tmp_path, 3) / "__0_0.distcp").unlink()
    assert ResumeHint(tmp_path, None).line(tmp_path) is None, "it is damaged"


@pytest.mark.parametrize("new", [False, True])
def test_the_newest_checkpoint(tmp_path: Path, new: bool) -> None:
    run = tmp_path / "a run"
    start = None if new else save(run, 3)
    continuation = ResumeHint(run, start)
    if new:
        save(run, 3)
    assert continuation.line(run) == f"to continue from step 3: `lmcore train --continue '{run}'`"
    save(run, 1_000)
    assert continuation.line(run) == (
        f"to continue from step 1,000: `lmcore train --continue '{run}'`"
    )


def test_a_return_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """Until the run saves, a later checkpoint is not the one that it continued from."""
    early, _ = save(tmp_path, 3), save(tmp_path, 9)
    continuation = ResumeHint(tmp_path, early)
    assert continuation.line(tmp_path) == (
        f"to continue from step 3: `lmcore train --continue {early}`"
    )
    save(tmp_path, 4)
    assert continuation.line(tmp_path) == (
        f"to continue from step 4: `lmcore train --continue {tmp_path}`"
    )
