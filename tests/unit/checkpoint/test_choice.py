"""The checkpoint that `--ckpt-step` chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.checkpoint import save_checkpoint
from lmcore.checkpoint.choice import chosen_checkpoint
from lmcore.config.checkpoint_step import checkpoint_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 5, 10 and 20; 5 and then 10 were the best."""
    for step, best in ((5, True), (10, True), (20, None)):
        meta: dict[str, Any] = {} if best is None else {"best": best}
        folder = tmp_path / "run/checkpoints"
        save_checkpoint(folder, step, {"w": torch.zeros(2)}, meta, model_shape={})
    return tmp_path / "run"


@pytest.mark.parametrize("text", ["10", "010", "iter_0000010", "global_step10"])
def test_a_step(run: Path, text: str) -> None:
    """A number, or a name of lmcore's or DeepSpeed's."""
    for path in (run, run / "checkpoints", run / "checkpoints/iter_0000010"):
        assert chosen_checkpoint(path, text) == run / "checkpoints/iter_0000010"


def test_a_step_that_is_not_there(run: Path) -> None:
    """The error lists the steps, and suggests the nearest."""
    with pytest.raises(CheckpointError, match="no checkpoint of step 12") as caught:
        chosen_checkpoint(run, "12")
    assert caught.value.why == "there are checkpoints of steps 5, 10, 20"
    assert "`--ckpt-step 10`" in str(caught.value.hint)
    (run / "checkpoints/iter_0000010/manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="iter_0000010"):
        chosen_checkpoint(run, "10")
    with pytest.raises(CheckpointError, match="no checkpoint of step 10"):
        chosen_checkpoint(run / "checkpoints/iter_0000005", "10")


def test_the_best(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is the last one marked; damaged ones are passed over with a warning."""
    assert chosen_checkpoint(run, "best") == run / "checkpoints/iter_0000010"
    with pytest.raises(CheckpointError, match="is marked as the best"):
        chosen_checkpoint(run / "checkpoints/iter_0000020", "best")
    assert not caplog.text
    (run / "checkpoints/iter_0000010/manifest.json").write_text("{}")
    assert chosen_checkpoint(run, "best") == run / "checkpoints/iter_0000005"
    assert "`iter_0000005` is the best of the checkpoints" in caplog.text
    assert "`iter_0000010`: " in caplog.text
    (run / "checkpoints/iter_0000005/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no readable checkpoint") as caught:
        chosen_checkpoint(run, "best")
    assert "`iter_0000005`: " in str(caught.value.why)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "iter_", "latest", "9" * 30])
def test_neither_a_step_nor_best(text: str) -> None:
    """Anything else is an error."""
    with pytest.raises(ConfigError, match="expected the number of a step"):
        checkpoint_step(text)
