"""Runs of lmcore as states: which optimizer's state is converted, and what a new run records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import GPT2, RandomState
from torch import nn

from lmcore.checkpoint import read_manifest, save_checkpoint
from lmcore.config.section import OptimizerSection
from lmcore.conversion.convert import convert
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ADAM, WEIGHT, Progress
from lmcore.model.shape import ModelShape
from lmcore.optim.create import create_optimizer
from lmcore.optim.loss_scale import DynamicLossScale

ALIKE = ModelShape(1, 256, 4, 256, 16, 256)
"""Shape of a model whose 8-bit blocks, of 256 codes, have the shapes of its matrices."""


def save_run(directory: Path, optimizer: str, shape: ModelShape, **changes: Any) -> RandomState:
    """Save a model and the initial state of a run's optimizer, with *changes* of tensors."""
    state = RandomState(shape)
    named = [(name, nn.Parameter(state.read(name))) for name in state.parameters]
    section = OptimizerSection(optimizer=optimizer)
    made = create_optimizer(section, named, bind=lambda _op: lambda *_arguments: None)
    tensors = {f"model.{name}": weight.detach() for name, weight in named}
    tensors |= {f"optimizer.{name}": held for name, held in made.state_tensors().items()}
    tensors |= changes
    meta = {
        "config": {"config": {"optimizer": {"optimizer": optimizer}}},
        "counters": {"iteration": 1, "consumed_samples": 8},
    }
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_checkpoint(directory / "checkpoints", 1, kept, meta, model_shape=shape.to_dict())
    return state


@pytest.mark.parametrize("shape", [ALIKE, GPT2], ids=["shapes of weights", "other shapes"])
def test_moments_in_8_bits_are_left_out(shape: ModelShape, tmp_path: Path) -> None:
    """Codes have the names of Adam's moments, and at some sizes their shapes; a note says it."""
    state = save_run(tmp_path / "run", "adam8bit", shape)
    done = convert(tmp_path / "run", tmp_path / "out", "megatron")
    assert not done.optimizer
    assert (
        "the state of its optimizer is left out: it is that of `adam8bit`, and only Adam's is "
        "converted"
    ) in done.notes
    convert(tmp_path / "out", tmp_path / "back", "lmcore")
    back = LmcoreState(tmp_path / "back")
    for name in state.parameters:
        assert torch.equal(back.read(name), state.read(name))


@pytest.mark.parametrize("optimizer", ["adopt", "lamb", "sgd"])
def test_other_optimizers_are_left_out(optimizer: str, tmp_path: Path) -> None:
    """Their averages are not Adam's, also under the same names: a continued run starts at 0."""
    save_run(tmp_path / "run", optimizer, GPT2)
    found = LmcoreState(tmp_path / "run")
    assert found.kinds == (WEIGHT,)
    assert f"`{optimizer}`" in found.training_notes[0]
    done = convert(tmp_path / "run", tmp_path / "out", "lmcore")
    assert not any(name.startswith("optimizer.") for name in manifest_of(tmp_path / "out").tensors)
    assert any(f"`{optimizer}`" in note for note in done.notes)
    bare = convert(tmp_path / "run", tmp_path / "bare", "lmcore", weights_only=True)
    assert not any(f"`{optimizer}`" in note for note in bare.notes)


NAME = "optimizer.exp_avg_sq.final_norm.weight"


@pytest.mark.parametrize(
    "tensor, reason",
    [
        (None, f"it lacks `{NAME}`"),
        (torch.zeros(3), f"`{NAME}` is float32 [3], and its parameter [24]"),
        (torch.zeros(24, dtype=torch.uint8), f"`{NAME}` is uint8 [24], and its parameter [24]"),
    ],
)
def test_moments_that_do_not_fit(tensor: torch.Tensor | None, reason: str, tmp_path: Path) -> None:
    """A note names the first one, and the weights are converted."""
    save_run(tmp_path, "adam", GPT2, **{NAME: tensor})
    found = LmcoreState(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert found.training_notes == [f"the state of its optimizer is left out: {reason}"]


def manifest_of(run: Path) -> Any:
    return read_manifest(next(run.glob("checkpoints/iter_*")))


def test_adam_is_recorded(tmp_path: Path) -> None:
    """A continued run knows whose the moments are, and their settings if no argument has them."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    adam = {"beta1": 0.85, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0}
    scale = {"value": 4096.0, "good_steps": 7, "tolerance": -1}
    state.progress = Progress(7, 56, 7, adam=adam, scheduled_samples=48, loss_scale=scale)
    state.settings = {"adam_eps": 1e-5}
    write_lmcore(state, tmp_path, None)
    meta = manifest_of(tmp_path).meta
    assert meta["config"]["config"]["optimizer"] == {
        "optimizer": "adam",
        "adam_beta1": 0.85,
        "adam_beta2": 0.95,
        "adam_eps": 1e-5,
        "weight_decay": 0.0,
    }
    assert meta["counters"]["scheduled_samples"] == 48
    continued = DynamicLossScale()
    continued.restore(meta["loss_scale"])
    assert (continued.value, continued.good_steps, continued.tolerance) == (4096.0, 7, -1)
    found = LmcoreState(tmp_path).progress
    assert found is not None
    assert (found.loss_scale, found.adam) == (scale, adam | {"eps": 1e-5})


def test_no_optimizer_is_recorded_for_weights(tmp_path: Path) -> None:
    """A run with new state may have any optimizer."""
    write_lmcore(RandomState(GPT2), tmp_path, None)
    assert "optimizer" not in manifest_of(tmp_path).meta["config"]["config"]
    assert LmcoreState(tmp_path).training_notes == []
