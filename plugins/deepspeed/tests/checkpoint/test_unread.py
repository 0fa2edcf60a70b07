"""No tensor of DeepSpeed's files is left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
import torch
from changed_tensors import Content, is_noticed, observed, unnoticed
from megatron_files import run_progress
from model_states import RandomState

from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.write import write_deepspeed

TRAINED = RandomState(ModelShape(2, 8, 2, 12, 12, 24), (WEIGHT, *ADAM))
TRAINED.progress = run_progress()
BF16 = torch.bfloat16

WRITERS: dict[str, Callable[[Path], Any]] = {
    "deepspeed": lambda root: deepspeed_files.write(
        TRAINED, root, deepspeed_files.Layout(tensor=2, form="plain", dtype=torch.float32)
    ),
    "deepspeed pipeline, zero 1": lambda root: deepspeed_files.write(
        TRAINED, root, deepspeed_files.Layout(tensor=2, stages=2, zero=1, data=2)
    ),
    "deepspeed zero 3": lambda root: deepspeed_files.write(
        TRAINED, root, deepspeed_files.Layout(zero=3, data=2)
    ),
    "universal": lambda root: write_deepspeed(
        TRAINED, root, None, layout=Layout(), style="legacy", dtype=BF16
    ),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", WRITERS)
def test_each_tensor_that_is_altered(name: str, every: bool, tmp_path: Path) -> None:
    """Replicas, copies of other stages, partitions of ZeRO and heads too."""
    WRITERS[name](tmp_path)
    assert unnoticed(tmp_path, every=every) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_that_is_added(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    content, before = Content(tmp_path), observed(tmp_path)
    path, keys = content.places()[0]
    if name == "universal":
        path = tmp_path / "global_step6/zero/extra.weight/fp32.pt"
        path.parent.mkdir()
        torch.save({"param": torch.ones(3)}, path)
    elif "pipeline" in name:
        content.change(next(tmp_path.glob("*/layer_02*")), ("input_layernorm.weight",), None)
    elif "zero 3" in name:
        content.change(next(tmp_path.glob("*/*model_states.pt")), ("module", "weight"), None)
    else:
        content.change(path, keys, None)
    assert is_noticed(tmp_path, before)
