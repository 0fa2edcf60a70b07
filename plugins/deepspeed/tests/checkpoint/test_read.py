"""Checkpoints of Megatron-DeepSpeed in every layout, and files that are missing or damaged."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout, edit, write
from megatron_models import BIASED_LLAMA, GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.state import ADAM, WEIGHT, ModelState, Progress
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.directory import is_deepspeed
from lmcore_deepspeed.checkpoint.read import read_deepspeed

SHAPES = {"gpt": GPT, "llama": LLAMA, "biased llama": BIASED_LLAMA}
ODD = replace(GPT, hidden_size=12, num_attention_heads=3, num_query_groups=3, ffn_hidden_size=7)
"""Shape whose parameters no even number of ranks divides without padding."""


def same_in_half(found: ModelState, expected: ModelState) -> None:
    """Compare the weights of *found*, in bfloat16, with the weights of *expected*."""
    assert found.kinds == (WEIGHT,)
    for name in expected.parameters:
        assert found.dtype(name) == torch.bfloat16
        assert torch.equal(found.read(name), expected.read(name).bfloat16()), name


@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(1, 1), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_without_zero(shape: ModelShape, layout: Layout, tmp_path: Path) -> None:
    """Rank files and layer files give the weights in which the model computed, and say so."""
    state = MemoryState(shape)
    write(state, tmp_path, layout)
    found = read_deepspeed(tmp_path)
    same_in_half(found, state)
    assert (found.shape, found.vocab_size) == (shape, 23)
    assert found.progress == Progress(7, 70)
    assert any("the weights are bfloat16" in note for note in found.notes)
    assert is_deepspeed(tmp_path)
    assert is_deepspeed(tmp_path / "global_step7")


def test_partitions_without_shapes_are_reported(tmp_path: Path) -> None:
    """The weights are the model's, in 16 bits: nothing gives the order of ZeRO's parameters."""
    directory = write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1, mapped=False))
    path = directory / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path, weights_only=False) | {"param_shapes": None}, path)
    found = read_deepspeed(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert any("lacks `param_shapes`" in note for note in found.notes)


def test_grouped_queries_in_an_old_order(tmp_path: Path) -> None:
    """A version that does not have them is refused."""
    directory = write(MemoryState(LLAMA), tmp_path, Layout())
    edit(directory / "mp_rank_00_model_states.pt", lambda one: one.update(checkpoint_version=0))
    with pytest.raises(CheckpointError, match="does not say how its queries"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize("first_block", [2, 3])
def test_numbers_of_layers(first_block: int, tmp_path: Path) -> None:
    """Blocks begin at layer 2 in Microsoft's repository and at 3 in BigScience's."""
    state = MemoryState(GPT)
    write(state, tmp_path, Layout(1, 2, first_block=first_block))
    names = {path.name[:8] for path in (tmp_path / "global_step7").glob("layer_*")}
    assert (f"layer_0{first_block}" in names, "layer_02" in names) == (True, first_block == 2)
    same_in_half(read_deepspeed(tmp_path), state)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(zero=1),
        Layout(zero=1, data=2),
        Layout(2, 2, zero=1, data=3),
        Layout(2, zero=1, data=2, mapped=False),
        Layout(zero=3, data=2),
        Layout(2, zero=3, data=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [ODD, BIASED_LLAMA], ids=["gpt", "llama"])
def test_partitions_of_zero(shape: ModelShape, layout: Layout, tmp_path: Path) -> None:
    """Weights are the float32 of the partitions; the state of Adam comes with them."""
    if shape is ODD and layout.tensor == 2:
        shape = GPT
    state = MemoryState(shape, optimizer=True)
    write(state, tmp_path, layout)
    found = read_deepspeed(tmp_path)
    assert_same(found, state)
    assert found.dtype("token_embedding.weight") == torch.float32
    assert found.progress == Progress(7, 70, optimizer_step=6)
    assert not any("float" in note for note in found.notes)


def test_arguments_of_bigscience(tmp_path: Path) -> None:
    """Older arguments, without key-value heads and a normalization, describe a GPT."""
    state = MemoryState(GPT)
    directory = write(state, tmp_path, Layout())

    def age(content: dict[str, Any]) -> None:
        kept = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        kept += ("max_position_embeddings", "attention_dropout", "hidden_dropout")
        args = {name: getattr(content["args"], name) for name in kept}
        content["args"] = argparse.Namespace(**args, layernorm_epsilon=1e-5)

    edit(directory / "mp_rank_00_model_states.pt", age)
    same_in_half(read_deepspeed(tmp_path), state)


def refusal(path: Path) -> str:
    """Return the whole message with which a directory is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_deepspeed(path)
    return f"{caught.value}\n{caught.value.why}\n{caught.value.hint}"


@pytest.mark.parametrize(
    "layout, lost, message",
    [
        (Layout(2), "mp_rank_01_m*", "has 2 ranks; missing: `mp_rank_01_model_states.pt`"),
        (Layout(2, 2), "mp_rank_03_m*", "has 4 ranks; missing: `mp_rank_03_model_states.pt`"),
        (
            Layout(2, 2),
            "layer_03-model_01*",
            "has 2 ranks of layer 3; missing: `layer_03-model_01-model_states.pt`",
        ),
        (
            Layout(2, 2),
            "layer_03-*",
            "2 files missing: `layer_03-model_00-model_states.pt`, `layer_03-model_01-",
        ),
        (
            Layout(zero=1, data=3),
            "*zero_pp_rank_1_*",
            "has 3 ranks; missing: `bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt`",
        ),
        (
            Layout(zero=1, data=3),
            "*zero_pp_rank_2_*",
            "has 3 ranks; missing: `bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt`",
        ),
        (
            Layout(2, zero=1),
            "*zero_pp_rank_0_mp_rank_01_o*",
            "has 1 rank; missing: `bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt`",
        ),
        (
            Layout(zero=3, data=2),
            "*zero_pp_rank_1_*_optim*",
            "has 2 ranks; missing: `bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt`",
        ),
        (
            Layout(zero=3, data=2),
            "*_optim*",
            "has 2 ranks; missing: `[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt`",
        ),
        (
            Layout(zero=3, data=2),
            "zero_pp_rank_1_*_model*",
            "has 2 ranks; missing: `zero_pp_rank_1_mp_rank_00_model_states.pt`",
        ),
    ],
    ids=str,
)
def test_missing_files_are_named(layout: Layout, lost: str, message: str, tmp_path: Path) -> None:
    """The message says how many ranks there are, and whose file is missing."""
    directory = write(MemoryState(GPT, optimizer=bool(layout.zero)), tmp_path, layout)
    for path in list(directory.glob(lost)):
        path.unlink()
    assert message in refusal(tmp_path)


def test_weights_without_their_partitions(tmp_path: Path) -> None:
    """Weights of a ZeRO-1 run whose optimizer was not kept are read in 16 bits, with a note."""
    state = MemoryState(GPT, optimizer=True)
    directory = write(state, tmp_path, Layout(zero=1, data=2))
    for path in list(directory.glob("*optim*")):
        path.unlink()
    found = read_deepspeed(tmp_path)
    same_in_half(found, state)
    assert any("the weights are bfloat16" in note for note in found.notes)


def test_missing_and_surplus_tensors_are_listed(tmp_path: Path) -> None:
    """Each is named; so is a wrong shape."""
    directory = write(MemoryState(GPT), tmp_path, Layout(2, 1))

    def spoil(content: dict[str, Any]) -> None:
        del content["mlp.dense_4h_to_h.bias"]
        content["mlp.router.weight"] = torch.zeros(2)
        content["input_layernorm.weight"] = torch.zeros(3)
        content["input_layernorm.bias"] = torch.zeros(16, dtype=torch.int8)

    edit(directory / "layer_03-model_01-model_states.pt", spoil)
    text = refusal(tmp_path)
    assert "`blocks.1.feed_forward.down_bias` of rank 1 is missing" in text
    assert "`3.mlp.router.weight` of rank 1 is surplus" in text
    assert "`3.input_layernorm.weight` of rank 1 has shape [3] instead of [16]" in text
    assert "`3.input_layernorm.bias` of rank 1 has no floating-point values" in text


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda one: one.update(single_partition_of_fp32_groups=[]), "are no flat tensors"),
        (lambda one: one["single_partition_of_fp32_groups"].pop(), "do not fit its groups"),
        (lambda one: one["param_slice_mappings"][0].popitem(), "of which"),
        (
            lambda one: setattr(
                next(iter(one["param_slice_mappings"][0].values())), "start", 10**6
            ),
            "is outside of its vector",
        ),
        (lambda one: one.clear(), "has no partition of ZeRO"),
    ],
)
def test_partitions_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    """Vectors and pieces that are not the model's are an error, and never other weights."""
    directory = write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1))
    path = directory / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    edit(path, lambda content: change(content["optimizer_state_dict"]))
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_partitions_of_another_model(stage: int, tmp_path: Path) -> None:
    """Partitions of a smaller model beside the files of this one are refused."""
    write(MemoryState(GPT, optimizer=True), tmp_path / "a", Layout(zero=stage, mapped=False))
    small = MemoryState(replace(GPT, num_layers=2), optimizer=True)
    other = write(small, tmp_path / "b", Layout(zero=stage, mapped=False))
    for path in other.glob("*optim*"):
        shutil.copy(path, tmp_path / "a" / "global_step7")
    assert "does not fit the model" in refusal(tmp_path / "a")


@pytest.mark.parametrize("layout", [Layout(zero=1, data=2), Layout(1, 1, zero=1)], ids=str)
def test_files_of_two_checkpoints(layout: Layout, tmp_path: Path) -> None:
    """Partitions of another step of the same run are not read as this one's weights."""
    state = MemoryState(GPT, optimizer=True)
    directory = write(state, tmp_path / "a", layout)
    later = MemoryState(GPT, optimizer=True)
    for kind in later.kinds:
        later.tensors["blocks.1.feed_forward.up.weight", kind] += 0.01
    for path in write(later, tmp_path / "b", layout).glob("*optim*"):
        shutil.copy(path, directory)
    found = read_deepspeed(tmp_path / "a")
    found.read("blocks.0.feed_forward.up.weight")
    with pytest.raises(CheckpointError, match="do not fit the model's"):
        found.read("blocks.1.feed_forward.up.weight")


def test_positions_of_the_last_stage(tmp_path: Path) -> None:
    """The last stage's copy of the embedding has positions that it does not use."""
    state = MemoryState(GPT, optimizer=True)
    directory = write(state, tmp_path, Layout(1, 2, zero=1))
    name = "tied_modules.embed.position_embeddings.weight"
    size = state.parameters["position_embedding.weight"]
    optimizer = directory / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"

    def add(content: dict[str, Any]) -> None:
        content["param_shapes"] = [{name: torch.Size(size)}, *content["param_shapes"]]

    def add_partition(content: dict[str, Any]) -> None:
        held = content["optimizer_state_dict"]
        kind = type(next(iter(held["param_slice_mappings"][0].values())))
        count = size[0] * size[1]
        held["param_slice_mappings"].insert(0, {name: kind(count, 0)})
        held["single_partition_of_fp32_groups"].insert(0, torch.full((count,), 7.0))
        states = held["base_optimizer_state"]["state"]
        other = {kind: torch.full((count,), 7.0) for kind in ADAM}
        held["base_optimizer_state"]["state"] = {0: other, 1: states[0], 2: states[1]}

    edit(directory / "mp_rank_01_model_states.pt", add)
    edit(optimizer, add_partition)
    assert_same(read_deepspeed(tmp_path), state)


def test_pointers(tmp_path: Path) -> None:
    """`latest` decides; without it the user does; a damaged or dangling one is an error."""
    first = write(MemoryState(GPT), tmp_path, Layout())
    shutil.copytree(first, tmp_path / "global_step9")
    assert read_deepspeed(tmp_path).progress == Progress(7, 70)
    (tmp_path / "latest").unlink()
    assert "does not say which checkpoint is the newest" in refusal(tmp_path)
    assert read_deepspeed(first).shape == GPT
    (tmp_path / "latest").write_text("global_step11")
    assert "`latest` names `global_step11`" in refusal(tmp_path)
    (tmp_path / "latest").write_text("../global_step9")
    assert "instead of the name of a directory beside it" in refusal(tmp_path)
    (tmp_path / "latest").write_text("\n")
    assert "it is empty instead of the name" in refusal(tmp_path)
    assert f"such as `{tmp_path / 'global_step9'}`" in refusal(tmp_path)
    assert "has no checkpoint of DeepSpeed" in refusal(tmp_path / "nothing")
    assert not is_deepspeed(tmp_path / "nothing")


def test_without_any_model_file(tmp_path: Path) -> None:
    """A directory with layer files alone is recognized, and the missing file is named."""
    directory = write(MemoryState(GPT), tmp_path, Layout(1, 1))
    (directory / "mp_rank_00_model_states.pt").unlink()
    assert is_deepspeed(tmp_path)
    assert "it has no `mp_rank_*_model_states.pt`" in refusal(tmp_path)


def test_experts_are_refused(tmp_path: Path) -> None:
    """A model with experts is named by a file of one."""
    directory = write(MemoryState(GPT), tmp_path, Layout())
    torch.save({}, directory / "layer_0_expert_1_mp_rank_00_model_states.pt")
    assert "is a part of a model with experts" in refusal(tmp_path)


def test_models_that_lmcore_lacks(tmp_path: Path) -> None:
    """ALiBi, which BigScience's models use, is refused with its argument."""
    directory = write(MemoryState(GPT), tmp_path, Layout())

    def change(content: dict[str, Any]) -> None:
        content["args"].position_embedding_type = "mrope"

    edit(directory / "mp_rank_00_model_states.pt", change)
    assert "`position_embedding_type` is `mrope`" in refusal(tmp_path)


def test_a_damaged_file(tmp_path: Path) -> None:
    """A truncated file is named."""
    directory = write(MemoryState(GPT), tmp_path, Layout(1, 1))
    path = directory / "layer_04-model_00-model_states.pt"
    whole = path.read_bytes()
    for length in (len(whole) - 200, len(whole) // 2, 500):
        path.write_bytes(whole[:length])
        assert path.name in refusal(tmp_path)
        assert "it is truncated" in refusal(tmp_path)


def test_schedules(tmp_path: Path) -> None:
    """The schedule of Megatron-DeepSpeed counts samples; one that counts tokens is named."""
    directory = write(MemoryState(GPT), tmp_path, Layout())
    saved = {"max_lr": 1e-3, "min_lr": 1e-5, "lr_decay_style": "cosine", "num_steps": 60}
    saved |= {"lr_warmup_steps": 10, "lr_decay_steps": 200, "lr_decay_tokens": None}
    path = directory / "mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(lr_scheduler=saved))
    progress = read_deepspeed(tmp_path).progress
    assert progress is not None
    assert progress.schedule == {
        "style": "cosine",
        "highest": 1e-3,
        "lowest": 1e-5,
        "warmup_samples": 10.0,
        "decay_samples": 200,
    }
    assert (progress.consumed_samples, progress.position) == (70, 60)  # one step was skipped
    edit(path, lambda content: content["lr_scheduler"].update(lr_decay_tokens=10**9))
    found = read_deepspeed(tmp_path)
    assert found.progress == Progress(7, 70)
    assert any("counts tokens" in note for note in found.notes)


@pytest.mark.parametrize("argument", ["lr_decay_tokens", "lr_warmup_tokens"])
def test_schedule_of_bigscience(argument: str, tmp_path: Path) -> None:
    """Its scheduler saves the samples of the decay beside; only the arguments have the tokens."""
    directory = write(MemoryState(GPT), tmp_path, Layout(), **{argument: 10**9})
    saved = {"max_lr": 1e-3, "min_lr": 1e-5, "decay_style": "cosine", "num_steps": 70}
    saved |= {"warmup_steps": 10, "decay_steps": 200, "warmup_tokens": 0, "num_tokens": 840}
    path = directory / "mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(lr_scheduler=saved))
    found = read_deepspeed(tmp_path)
    assert found.progress == Progress(7, 70)
    assert any("counts tokens" in note for note in found.notes)
