"""Conversions of the weights alone from and to DeepSpeed's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout, edit, write
from megatron_models import trained
from weights_only import converted, require_weights_alone, same_weights

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import convert
from lmcore.conversion.loading.weights import WeightReader
from lmcore_deepspeed.checkpoint.write import write_deepspeed

NAME = "blocks.0.feed_forward.up.weight"


@pytest.mark.parametrize("zero", [1, 3])
def test_partitions_of_zero(zero: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ZeRO 1 they are the module's; with ZeRO-3 the partitions are the only weights."""
    state = trained()
    directory = write(state, tmp_path / "in", Layout(zero=zero, data=2))
    dtype = torch.bfloat16 if zero == 1 else torch.float32
    for path in directory.glob("*zero_pp_rank_1_*optim*"):
        edit(path, lambda content: _adam_of(content).clear())
    with pytest.raises(CheckpointError, match="lacks the state of Adam") as caught:
        convert(tmp_path / "in", tmp_path / "out", "lmcore")
    assert "--weights-only`" in str(caught.value.hint)
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, dtype)
    reader = WeightReader(tmp_path / "in")
    assert torch.equal(reader.read(NAME), state.read(NAME).to(dtype))
    assert "lacks the state of Adam" in caplog.text


def _adam_of(content: dict[str, Any]) -> dict[int, Any]:
    held = content["optimizer_state_dict"]
    return held.get("base_optimizer_state", held.get("optimizer_state_dict"))["state"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "another step"])
def test_files_of_zero_that_a_run_needs(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run does not begin with 16-bit weights because a file was not copied, or is damaged."""
    directory = write(trained(), tmp_path / "in", Layout(zero=1, data=2))
    (path,) = directory.glob("*zero_pp_rank_1_*optim*")
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        edit(path, lambda content: _adam_of(content)[0].update(step=3))
    with pytest.raises(CheckpointError):
        WeightReader(tmp_path / "in").read(NAME)
    assert not caplog.records


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    """Its weights in float32 are read without its moments."""
    state = trained()
    (tmp_path / "in").mkdir()
    write_deepspeed(state, tmp_path / "in", None, dtype=torch.bfloat16)
    next(tmp_path.glob("in/global_step7/zero/*/exp_avg.pt")).write_bytes(b"damaged")
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, torch.float32)


def test_a_run_of_lmcore(tmp_path: Path) -> None:
    """The written checkpoint has no state of the optimizer, and no settings of it."""
    require_weights_alone("megatron-deepspeed", tmp_path)
