"""State of Adam of runs without ZeRO, in the files of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout, edit, write
from megatron_models import GPT, LLAMA, MemoryState, assert_same
from model_states import GPT2, RandomState

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import convert
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.read import read_deepspeed

Change = Callable[[dict[str, Any]], object]

FORMS = {
    "plain": torch.float32,
    "fused": torch.float16,
    "unfused": torch.bfloat16,
    "named": torch.bfloat16,
}
LAYOUTS = {"one": Layout(), "tensor": Layout(2), "stages": Layout(1, 2), "both": Layout(2, 4)}


def change(root: Path, action: Change, rank: int = 0) -> Path:
    """Change the optimizer in the file of a model-parallel rank."""
    path = root / "global_step7" / f"mp_rank_{rank:02d}_model_states.pt"
    edit(path, lambda content: action(content["optimizer"]))
    return path


def states(optimizer: dict[str, Any]) -> dict[int, Any]:
    """Return the states of torch's optimizer, by number."""
    found: dict[int, Any] = optimizer.get("optimizer_state_dict", optimizer)["state"]
    return found


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_state(form: str, layout: Layout, shape: ModelShape, tmp_path: Path) -> None:
    """Weights in float32 and both moments are read, whatever the form and the layout."""
    if form == "named" and not layout.stages:
        layout = replace(layout, stages=1)
    state = MemoryState(shape, optimizer=True)
    write(state, tmp_path, replace(layout, form=form, dtype=FORMS[form]))
    found = read_deepspeed(tmp_path)
    assert_same(found, state)
    assert not any("Adam" in note or "float" in note for note in found.notes)
    assert found.progress is not None
    assert (found.progress.iteration, found.progress.optimizer_step) == (7, 6)
    scale = {"value": 4096.0, "good_steps": 4, "tolerance": 1} if form == "fused" else None
    assert found.progress.loss_scale == scale
    if form in {"plain", "unfused"}:
        adam = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
        assert found.progress.adam == adam


@pytest.mark.parametrize("form", FORMS)
def test_weights_alone(form: str, tmp_path: Path) -> None:
    """The model's own weights can be taken."""
    state = MemoryState(GPT, optimizer=True)
    write(state, tmp_path, Layout(1, 2, form=form))
    found = read_deepspeed(tmp_path, weights_only=True)
    assert (found.kinds, found.progress) == ((WEIGHT,), Progress(7, 70))
    for name in state.parameters:
        assert torch.equal(found.read(name), state.read(name).bfloat16()), name


def one_group(optimizer: dict[str, Any]) -> None:
    """Put all parameters of a plain state in one group, in the order of the model."""
    groups = optimizer["param_groups"]
    order = [*groups[0]["params"], *groups[1]["params"]]
    groups[:] = [groups[0] | {"params": order}]


def swapped(optimizer: dict[str, Any]) -> None:
    """Put the group of biases and gains first."""
    optimizer["param_groups"].reverse()


def test_other_groups(tmp_path: Path) -> None:
    """Groups can be in the other order."""
    state = MemoryState(GPT, optimizer=True)
    write(state, tmp_path, Layout(form="plain", dtype=torch.float32))
    change(tmp_path, swapped)
    assert_same(read_deepspeed(tmp_path), state)
    change(tmp_path, one_group)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        read_deepspeed(tmp_path)
    assert "in the place of" in str(caught.value.why)


@pytest.mark.parametrize(
    "form, action, why",
    [
        ("plain", lambda one: one["state"].clear(), "it has no state yet"),
        ("plain", lambda one: one.pop("param_groups"), "it is of an unknown form"),
        (
            "plain",
            lambda one: [s.update(square=s.pop("exp_avg")) for s in one["state"].values()],
            "it has `exp_avg_sq`, `square` instead",
        ),
        (
            "plain",
            lambda one: one["param_groups"].append({"params": [0]}),
            "it has 3 groups of parameters, whose members are not known",
        ),
        (
            "named",
            lambda one: one.update(partition_count=[2, 2]),
            "without ZeRO, DeepSpeed saves the share of the first of 2 data-parallel ranks only",
        ),
        (
            "named",
            lambda one: one.pop("param_slice_mappings"),
            "its vectors have no names of parameters",
        ),
    ],
    ids=["empty", "unknown form", "other optimizer", "groups", "share", "no names"],
)
def test_a_state_that_is_not_read(form: str, action: Change, why: str, tmp_path: Path) -> None:
    """The weights are read, and a note has the reason."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(1, 1, form=form, dtype=FORMS[form]))
    change(tmp_path, action)
    found = read_deepspeed(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert f"the state of Adam is not read: {why}" in found.notes


@pytest.mark.parametrize(
    "form, action, why",
    [
        ("plain", lambda one: one["state"].pop(3), "1 parameter"),
        ("plain", lambda one: one["param_groups"][0]["params"].pop(), "its groups have [17, 34]"),
        (
            "plain",
            lambda one: one["state"][0].update(exp_avg=torch.zeros(3, 16)),
            "has shape [3, 16] instead of [24, 16]",
        ),
        (
            "plain",
            lambda one: one["state"][0].update(exp_avg_sq=torch.zeros(3, 16)),
            "`exp_avg_sq` of",
        ),
        (
            "plain",
            lambda one: one["state"][0].update(exp_avg_sq=torch.zeros(16, 24)),
            "is [16, 24], the weight [24, 16]",
        ),
        ("unfused", lambda one: one.pop("fp32_groups"), "lacks float32 weights"),
        ("unfused", lambda one: one["fp32_groups"][0].pop(), "`weight` of a group has 17 tensors"),
        (
            "fused",
            lambda one: one["fp32_groups_flat"].insert(0, one["fp32_groups_flat"].pop(0)[:-1]),
            "`weight` of a group has",
        ),
        (
            "fused",
            lambda one: states(one)[1].update(exp_avg=states(one)[1]["exp_avg"][:-1]),
            "elements, the model's",
        ),
    ],
    ids=range(9),
)
def test_a_state_that_does_not_fit(form: str, action: Change, why: str, tmp_path: Path) -> None:
    """It is an error that names the file; the weights can be read without it."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(form=form, dtype=FORMS[form]))
    path = change(tmp_path, action)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        read_deepspeed(tmp_path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value.why)
    assert "--weights-only`" in (caught.value.hint or "")
    assert read_deepspeed(tmp_path, weights_only=True).kinds == (WEIGHT,)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=["tensor", "stages"])
def test_a_rank_without_the_state(layout: Layout, tmp_path: Path) -> None:
    """A state that only some ranks have is an error."""
    write(MemoryState(GPT, optimizer=True), tmp_path, replace(layout, form="unfused"))
    change(tmp_path, lambda one: one.clear(), rank=1)
    with pytest.raises(CheckpointError, match="mp_rank_01_model_states") as caught:
        read_deepspeed(tmp_path)
    assert "state of Adam" in f"{caught.value} {caught.value.why}"


def test_stages_that_are_no_layers(tmp_path: Path) -> None:
    """A state whose size no layers have names the file of the stage."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(1, 2, form="unfused"))
    change(tmp_path, lambda one: states(one).pop(0), rank=0)
    change(tmp_path, lambda one: one["optimizer_state_dict"]["param_groups"][0]["params"].pop(0))
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states") as caught:
        read_deepspeed(tmp_path)
    assert "which no layers of the pipeline have" in str(caught.value.why)


@pytest.mark.parametrize("form", ["fused", "unfused", "named"])
def test_weights_of_another_checkpoint(form: str, tmp_path: Path) -> None:
    """Float32 weights that do not round to the model's are an error."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(1, 2, form=form, dtype=FORMS[form]))
    path = tmp_path / "global_step7" / "layer_03-model_00-model_states.pt"
    edit(path, lambda content: content["mlp.dense_h_to_4h.weight"].add_(0.5))
    found = read_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match="do not fit the model's"):
        found.read("blocks.1.feed_forward.up.weight")


@pytest.mark.parametrize("layout", [Layout(zero=1, data=2), Layout(2, 2, zero=1, data=2)], ids=str)
def test_partitions_that_have_names_alone(layout: Layout, tmp_path: Path) -> None:
    """In bfloat16 a pipeline without ZeRO has partitions all the same, without `param_shapes`."""
    state = MemoryState(GPT, optimizer=True)
    directory = write(state, tmp_path, layout)
    for path in directory.glob("mp_rank_*"):
        edit(path, lambda content: content.update(param_shapes=None))
    assert_same(read_deepspeed(tmp_path), state)
    next(iter(sorted(directory.glob("*optim*")))).unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_the_model_that_do_not_fit(form: str, tmp_path: Path) -> None:
    """They are named, and not the optimizer's state, which then does not fit either."""
    layout = Layout(form=form, stages=int(form == "named"), dtype=FORMS[form])
    write(MemoryState(GPT, optimizer=True), tmp_path, layout)
    path = tmp_path / "global_step7/mp_rank_00_model_states.pt"
    if layout.stages:
        [path] = path.parent.glob("layer_02-*")
        edit(path, lambda content: content.update(surplus=torch.ones(2)))
    else:
        edit(path, lambda content: content["module"].update(surplus=torch.ones(2)))
    with pytest.raises(CheckpointError, match="do not fit its arguments") as caught:
        read_deepspeed(tmp_path)
    assert "surplus` is surplus" in str(caught.value.why)


def test_what_a_run_that_continues_lacks(tmp_path: Path) -> None:
    """Files without the state of an optimizer; what they do not record is named as well."""
    write(RandomState(GPT2), tmp_path / "source", Layout())
    done = convert(tmp_path / "source", tmp_path / "run", "lmcore")
    absent = "the checkpoint has no optimizer state: its weights alone are written"
    assert absent in done.notes
    assert done.continue_flags == ("--override-opt-param-scheduler", "--no-load-optim")
    [unknown] = [note for note in done.notes if "does not record" in note]
    assert "`--global-batch-size`, `--train-iters`, `--lr`" in unknown
