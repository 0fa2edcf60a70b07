"""Models of transformers in checkpoints of DeepSpeed, described by a `config.json` beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout, edit, importable, stage_1, stage_3, without_zero
from megatron_models import LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import read_manifest
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface.recipes import recipes_of
from lmcore.conversion.huggingface.write import config_of, write_huggingface
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.checkpoint_format import format_of
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.read import read_deepspeed


def write(root: Path, shape: ModelShape, layout: Layout, *, tied: bool = False) -> MemoryState:
    """Write a checkpoint without arguments, under the names of transformers."""
    state = MemoryState(shape, optimizer=True)
    directory = root / "global_step5"
    directory.mkdir()
    (root / "latest").write_text("global_step5")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for kind in state.kinds:
        parts[kind] = {}
        for name, recipe in recipes_of("llama", shape).items():
            tensors = recipe.split(state.read(name, kind))
            parts[kind] |= dict(zip(recipe.sources, tensors, strict=True))
    weights = parts["weight"]
    groups = [list(weights)]
    module = {name: tensor.to(layout.dtype) for name, tensor in weights.items()}
    if tied:
        module["lm_head.weight"] = module["model.embed_tokens.weight"]
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    content: dict[str, Any] = {
        "module": module,
        "param_shapes": [{name: tensor.shape for name, tensor in weights.items()}],
        "shared_params": shared,
        "dp_world_size": layout.data,
        "mp_world_size": 1,
        "global_steps": 5,
        "global_samples": 40,
    }
    flats = {
        kind: {name: one.flatten() for name, one in held.items()} for kind, held in parts.items()
    }
    if layout.form:
        content |= {"param_shapes": None, "optimizer": without_zero(parts, layout)}
        torch.save(content, directory / "mp_rank_00_model_states.pt")
        return state
    with importable():
        for data in range(layout.data):
            rank = f"zero_pp_rank_{data}_mp_rank_00"
            if layout.zero == 3:
                empty = {name: torch.zeros(0) for name in module}
                torch.save({**content, "module": empty}, directory / f"{rank}_model_states.pt")
            else:
                torch.save(content, directory / "mp_rank_00_model_states.pt")
            optimizer = (stage_3 if layout.zero == 3 else stage_1)(flats, groups, data, layout)
            torch.save({"optimizer_state_dict": optimizer}, directory / f"{rank}_optim_states.pt")
    return state


def describe(place: Path, shape: ModelShape) -> None:
    config = config_of(shape, dtype="bfloat16", eos=None, bos=None)
    (place / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", [Layout(zero=1, data=2), Layout(zero=3, data=3)], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_its_names_and_shape(layout: Layout, inside: bool, tmp_path: Path) -> None:
    """Weights, both moments and the counters are read, with the configuration in either place."""
    state = write(tmp_path, LLAMA, layout)
    describe(tmp_path / "global_step5" if inside else tmp_path, LLAMA)
    found = read_deepspeed(tmp_path)
    assert_same(found, state)
    assert found.progress == Progress(5, 40, optimizer_step=6)
    assert format_of(tmp_path) == "megatron-deepspeed"


def test_settings_of_adam(tmp_path: Path) -> None:
    """A run of lmcore continues with the checkpoint's settings; `Trainer` has no weight decay."""
    write(tmp_path, LLAMA, Layout(zero=1))
    describe(tmp_path, LLAMA)
    (path,) = (tmp_path / "global_step5").glob("*optim*")
    settings = {"lr": 1e-5, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}

    def add(content: dict[str, Any]) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(settings)

    edit(path, add)
    convert(tmp_path, tmp_path / "out", "lmcore")
    (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("iter_*")
    assert read_manifest(checkpoint).meta["config"]["config"]["optimizer"] == {
        "optimizer": "adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_eps": 1e-6,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    "config,precision,expected",
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16", {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16", {"precision": "fp16"}),
        ({"bf16": {"enabled": False}}, "fp32", {}),
        ({"train_batch_size": 8}, "fp32", {}),
        ({"bf16": "auto", "fp16": None}, None, {}),
        (None, None, {}),
    ],
    ids=["bf16", "fp16", "off", "absent", "others", "none"],
)
def test_precision_of_the_run(
    config: object, precision: str | None, expected: dict[str, str], tmp_path: Path
) -> None:
    """The configuration of DeepSpeed says it; a run that was converted keeps it."""
    write(tmp_path, LLAMA, Layout(zero=1))
    describe(tmp_path, LLAMA)
    (path,) = (tmp_path / "global_step5").glob("mp_rank*")
    edit(path, lambda content: content.update(ds_config=config))
    found = read_deepspeed(tmp_path)
    assert (found.settings, found.precision) == (expected, precision)
    assert found.layout == {"tensor": 1, "data": 1}
    convert(tmp_path, tmp_path / "out", "lmcore")
    # The default length of a sample exceeds the model's positions.
    assert LmcoreState(tmp_path / "out").settings == {"seq_length": 12, **expected}


def test_a_tied_output(tmp_path: Path) -> None:
    """The output embedding is known as the same parameter as the token embedding."""
    shape = replace(LLAMA, untie_embeddings_and_output_weights=False)
    state = write(tmp_path, shape, Layout(zero=1, data=2), tied=True)
    describe(tmp_path, shape)
    assert_same(read_deepspeed(tmp_path), state)


def test_a_model_that_nothing_describes(tmp_path: Path) -> None:
    """The error says what is needed and where."""
    write(tmp_path, LLAMA, Layout(zero=1))
    with pytest.raises(CheckpointError, match="does not say which model it has") as caught:
        read_deepspeed(tmp_path)
    assert "no `config.json`" in (caught.value.why or "")
    assert "copy the model's `config.json`" in (caught.value.hint or "")


def test_another_configuration(tmp_path: Path) -> None:
    """A configuration of another model is refused with the tensors that differ."""
    write(tmp_path, LLAMA, Layout(zero=1))
    describe(tmp_path, replace(LLAMA, num_layers=5, ffn_hidden_size=24))
    with pytest.raises(CheckpointError) as caught:
        read_deepspeed(tmp_path)
    assert "`model.layers.4.input_layernorm.weight` is missing" in (caught.value.why or "")
    assert "has shape [20, 16] instead of [24, 16]" in (caught.value.why or "")


def test_a_directory_of_a_trainer(tmp_path: Path) -> None:
    """It has the model twice: the state of Adam is read from DeepSpeed's files only."""
    state = write(tmp_path, LLAMA, Layout(zero=1, data=2))
    write_huggingface(state, tmp_path, None)
    assert format_of(tmp_path) == "huggingface"
    found = read_state(tmp_path)
    assert found.kinds == (WEIGHT,)
    (note,) = found.notes
    assert "`--source-format megatron-deepspeed`" in note
    assert_same(read_state(tmp_path, "megatron-deepspeed"), state)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", ["plain", "fused", "unfused"])
def test_a_run_without_zero(form: str, tied: bool, tmp_path: Path) -> None:
    """The state in the model's file is read; a tied output is no parameter of the optimizer."""
    shape = replace(LLAMA, untie_embeddings_and_output_weights=not tied)
    dtype = torch.float32 if form == "plain" else torch.bfloat16
    state = write(tmp_path, shape, Layout(form=form, dtype=dtype), tied=tied)
    config = config_of(shape, dtype="bfloat16", eos=None, bos=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_deepspeed(tmp_path)
    assert_same(found, state)
    assert found.progress is not None
    assert found.progress.optimizer_step == 6


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("known", [True, False], ids=["recorded", "by files"])
def test_a_model_that_is_divided(zero: int, known: bool, tmp_path: Path) -> None:
    """AutoTP's ranks are refused, with the command that makes a universal checkpoint of them."""
    write(tmp_path, LLAMA, Layout(zero=zero))
    config = config_of(LLAMA, dtype="bfloat16", eos=None, bos=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in sorted((tmp_path / "global_step5").iterdir()):
        edit(path, lambda content: content.update(mp_world_size=2 if known else 1))
        path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_deepspeed(tmp_path)
    assert "divided over 2 ranks of tensor parallelism" in str(caught.value.why)
    assert "deepspeed.checkpoint.ds_to_universal" in str(caught.value.hint)
