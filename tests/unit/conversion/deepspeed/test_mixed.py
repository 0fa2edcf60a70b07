"""Files of several checkpoints of one run in one directory: refused, as far as the files tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import Layout, edit, write
from megatron_models import GPT, MemoryState

from lmcore.conversion.deepspeed.read import read_deepspeed
from lmcore.errors import CheckpointError


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
