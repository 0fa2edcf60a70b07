"""Files of several checkpoints of one run in one directory: refused, as far as the files tell."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import Layout, edit, write
from megatron_models import GPT, MemoryState

from lmcore.base.errors import CheckpointError
from lmcore.conversion.state import Progress
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed


def later_model(content: dict[str, Any]) -> None:
    """Make a model's file one of a later step."""
    content["iteration"] = content["global_steps"] = 9


def later_optimizer(content: dict[str, Any]) -> None:
    """Make a file of the optimizer one of a later step."""
    held = content["optimizer_state_dict"]
    saved = held.get("base_optimizer_state", held.get("optimizer_state_dict"))
    for state in saved["state"].values():
        state["step"] += 2


@pytest.mark.parametrize("weights_only", [False, True], ids=["all", "weights"])
@pytest.mark.parametrize(
    "layout, name, change, why",
    [
        (Layout(2), "mp_rank_01_model_states.pt", later_model, "is of step 9, `{}` of step 7"),
        (
            Layout(1, 2),
            "mp_rank_01_model_states.pt",
            later_model,
            "is of step 9, `{}` of step 7",
        ),
        (
            Layout(zero=3, data=2),
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            later_model,
            "is of step 9, `{}` of step 7",
        ),
        (
            Layout(zero=3, data=3),
            "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
            later_optimizer,
            "is of step 8, `{}` of step 6",
        ),
        (
            Layout(2, zero=3),
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
            later_optimizer,
            "is of step 8, `{}` of step 6",
        ),
    ],
    ids=["tensor", "pipeline", "zero3", "zero3-optimizer", "zero3-tensor"],
)
def test_files_of_another_step(
    layout: Layout, name: str, change: Any, why: str, weights_only: bool, tmp_path: Path
) -> None:
    """Both files are named, with the step of each."""
    directory = write(MemoryState(GPT, optimizer=bool(layout.zero)), tmp_path, layout)
    edit(directory / name, change)
    with pytest.raises(CheckpointError, match="is mixed from several checkpoints") as caught:
        read_deepspeed(tmp_path, weights_only=weights_only)
    first = re.sub(r"rank_\d", "rank_0", name, count=1)
    first = re.sub(r"mp_rank_\d\d", "mp_rank_00", first)
    assert caught.value.why == f"`{name}` " + why.format(first)


def write_universal(root: Path, iteration: int, updates: int) -> Path:
    """Write a universal checkpoint and return the directory of its parameters."""
    progress = Progress(iteration, 70, optimizer_step=updates)
    write_deepspeed(MemoryState(GPT, optimizer=True, progress=progress), root, None)
    return root / f"global_step{iteration}" / "zero"


@pytest.mark.parametrize("weights_only", [False, True], ids=["all", "weights"])
@pytest.mark.parametrize(
    "lost",
    [None, "*/step.pt", "optimizer_state.pt"],
    ids=["both", "state", "parameters"],
)
def test_a_universal_part_of_a_later_step(
    lost: str | None, weights_only: bool, tmp_path: Path
) -> None:
    """It is refused by the number of updates in either of its files, which is named."""
    universal = write_universal(tmp_path / "a", 4, 4)
    shutil.rmtree(universal)
    shutil.copytree(write_universal(tmp_path / "b", 8, 8), universal)
    for path in universal.glob(lost or "nothing"):
        path.unlink()
    with pytest.raises(CheckpointError, match="is mixed from several checkpoints") as caught:
        read_deepspeed(tmp_path / "a", weights_only=weights_only)
    name = min(path.name for path in universal.iterdir() if path.is_dir())
    file = "optimizer_state.pt" if lost == "*/step.pt" else f"{name}/step.pt"
    assert caught.value.why == (
        f"`zero/{file}` is of step 8, `mp_rank_00_model_states.pt` of step 4"
    )


def test_skipped_updates_of_a_universal_part(tmp_path: Path) -> None:
    """Fewer updates than steps are no sign of another checkpoint."""
    write_universal(tmp_path, 8, 4)
    assert read_deepspeed(tmp_path).progress == Progress(8, 70, optimizer_step=4)


def test_unknown_steps_of_a_universal_part(tmp_path: Path) -> None:
    """A damaged file that is not needed for the weights states no step."""
    universal = write_universal(tmp_path, 4, 4)
    for path in [*universal.glob("*/step.pt"), universal / "optimizer_state.pt"]:
        path.write_bytes(b"")
    assert read_deepspeed(tmp_path, weights_only=True).progress == Progress(4, 70)
