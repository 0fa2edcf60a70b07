"""State of Adam in rank files: round trips, Megatron's numbers by hand, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import (
    ADAM_SETTINGS,
    RANK_FILE,
    SCHEDULE,
    content_of,
    only_file,
    run_progress,
)
from megatron_models import GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.optimizer.groups import settings_of
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import WEIGHT
from lmcore.model.shape import ModelShape

UNREAD = "the state of its optimizer is not read: "


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_round_trip(
    shape: ModelShape, layout: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Weights in float32, both moments, steps, settings and schedule come back, bit by bit."""
    state = MemoryState(shape, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(*layout), dtype=dtype)
    found = MegatronState(tmp_path)
    assert_same(found, state)
    expected = dict(SCHEDULE)
    del expected["cooldown_fraction"]
    assert found.progress == run_progress(schedule=expected)


@pytest.mark.parametrize("style", STYLES)
def test_every_set_of_names(style: str, tmp_path: Path) -> None:
    """The order of the parameters differs between the sets; the state does not."""
    state = MemoryState(LLAMA, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, style=style, dtype=torch.bfloat16)
    assert_same(MegatronState(tmp_path), state)


def test_numbers_by_hand(tmp_path: Path) -> None:
    """Number 0 is the embedding, then matrices; gains and biases follow from their own group."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, style="legacy", dtype=torch.bfloat16)
    optimizer = content_of(tmp_path)["optimizer"]
    held, (decayed, others) = (
        optimizer["optimizer"]["state"],
        optimizer["optimizer"]["param_groups"],
    )
    assert (decayed["wd_mult"], decayed["weight_decay"]) == (1.0, 0.1)
    assert (others["wd_mult"], others["weight_decay"]) == (0.0, 0.0)
    # Two embeddings and 4 matrices in each of 4 layers; 8 vectors in each, and 2 of the last norm.
    assert decayed["params"] == list(range(18))
    assert others["params"] == list(range(18, 52))
    by_hand = {
        0: "token_embedding.weight",
        1: "position_embedding.weight",
        3: "blocks.0.attention.output.weight",
        18: "blocks.0.attention_norm.weight",
        21: "blocks.0.attention.output_bias",
        51: "final_norm.bias",
    }
    for number, name in by_hand.items():
        assert torch.equal(held[number]["exp_avg"], state.read(name, "exp_avg"))
    assert torch.equal(optimizer["fp32_from_fp16_params"][1][3], state.read(by_hand[21]))


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Stages of older versions may have the group without weight decay first."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, dtype=torch.bfloat16)
    content = content_of(tmp_path)
    content["optimizer"]["optimizer"]["param_groups"].reverse()
    content["optimizer"]["fp32_from_fp16_params"].reverse()
    torch.save(content, only_file(tmp_path))
    assert_same(MegatronState(tmp_path), state)
    for group in content["optimizer"]["optimizer"]["param_groups"]:
        del group["wd_mult"]
    torch.save(content, only_file(tmp_path))
    assert_same(MegatronState(tmp_path), state)


def decoupled(content: dict[str, Any], usual: float, own: float) -> None:
    """Divide the first group as megatron-core 0.16 does: embeddings have a different rate."""
    optimizer = content["optimizer"]["optimizer"]
    mains = content["optimizer"]["fp32_from_fp16_params"]
    matrices, others = optimizer["param_groups"]
    embedding = {**matrices, "params": matrices["params"][:1], "max_lr": own}
    matrices |= {"params": matrices["params"][1:], "max_lr": usual}
    optimizer["param_groups"] = [matrices, embedding, {**others, "max_lr": usual}]
    mains[:1] = [mains[0][1:], mains[0][:1]]
    # Numbers follow the order of the groups.
    count = len(matrices["params"])
    order = [*range(1, count + 1), 0, *range(count + 1, len(optimizer["state"]))]
    optimizer["state"] = {new: optimizer["state"][old] for new, old in enumerate(order)}
    matrices["params"], embedding["params"] = list(range(count)), [count]
    vars(content["args"]).update(lr=usual, decoupled_lr=own)


def test_embeddings_with_a_learning_rate_of_their_own(tmp_path: Path) -> None:
    """All groups say `is_decoupled_lr: False` since megatron-core 0.16: the rates tell them apart.

    Without a difference the state is left out, with a reason.
    """
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, dtype=torch.bfloat16)
    content = content_of(tmp_path)
    decoupled(content, 3e-4, 1e-4)
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    assert_same(found, state)
    (note,) = found.training_notes
    assert "another learning rate, 0.0001, for embeddings" in note
    content["args"].decoupled_lr = 3e-4
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert f"{UNREAD}two of its groups of parameters cannot be told apart" in found.notes


def test_weight_decay_of_zero(tmp_path: Path) -> None:
    """It is a setting of the run, and not left to a default; whole numbers are read, too."""
    groups = [{"weight_decay": 0, "betas": (0, 0.95), "eps": 1e-8}, {"weight_decay": 0.0}]
    assert settings_of(groups) == {"beta1": 0.0, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    assert settings_of([{"weight_decay": 0.1}, {"weight_decay": 0.0}]) == {"weight_decay": 0.1}
    adam = ADAM_SETTINGS | {"weight_decay": 0.0}
    state = MemoryState(GPT, optimizer=True, progress=run_progress(adam=adam))
    write_megatron(state, tmp_path, None)
    found = MegatronState(tmp_path).progress
    assert found is not None
    assert found.adam == adam


def test_main_parameters_of_another_model(tmp_path: Path) -> None:
    """Main parameters that do not round to the weights are refused when they are read."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, dtype=torch.bfloat16)
    content = content_of(tmp_path)
    mains = content["optimizer"]["fp32_from_fp16_params"][0]
    mains[2], mains[6] = mains[6], mains[2]  # the same matrix of two layers
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    assert torch.equal(found.read("token_embedding.weight"), state.read("token_embedding.weight"))
    for kind in found.kinds:
        with pytest.raises(CheckpointError, match="does not fit the model"):
            found.read("blocks.0.attention.output.weight", kind)


def test_main_parameters_of_one_group_alone(tmp_path: Path) -> None:
    """The main parameters of a whole group may be missing."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, dtype=torch.bfloat16)
    content = content_of(tmp_path)
    content["optimizer"]["fp32_from_fp16_params"].pop()
    torch.save(content, only_file(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    assert caught.value.why == "it lacks float32 parameters for 34 weights"


def test_state_that_does_not_fit(tmp_path: Path) -> None:
    """A missing parameter and a wrong shape are errors that say where."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None)
    content = content_of(tmp_path)
    last = content["optimizer"]["param_groups"][1]["params"].pop()
    torch.save(content, only_file(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    assert caught.value.why == "a group has 33 parameters, the model 34"
    content["optimizer"]["param_groups"][1]["params"].append(last)
    content["optimizer"]["state"][3]["exp_avg_sq"] = torch.zeros(2, 2)
    torch.save(content, only_file(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    assert "exp_avg_sq of" in (caught.value.why or "")
    assert "is [2, 2], not" in (caught.value.why or "")


def test_a_rank_without_its_optimizer(tmp_path: Path) -> None:
    """All ranks have the state, or none has."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(2))
    path = tmp_path / "iter_0000006" / "mp_rank_01" / RANK_FILE
    content = torch.load(path, weights_only=False)
    del content["optimizer"]
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    assert "`" + str(path) + "` has no optimizer" in (caught.value.why or "")


@pytest.mark.parametrize(
    "optimizer, reason",
    [
        ({"state": {}, "param_groups": [{"params": [0]}]}, "it has no state yet"),
        ({"state": {0: {"momentum_buffer": torch.zeros(1)}}}, "it is of an unknown form"),
        ({"optimizer": {"param_groups": [{"lr": 1.0}]}}, "it was distributed, and there is no"),
        ([{"a": 1}, {"b": 2}], "the run had several optimizers"),
    ],
)
def test_optimizers_that_are_not_read(optimizer: Any, reason: str, tmp_path: Path) -> None:
    """The weights are read, and a note says why the state is not."""
    write_megatron(MemoryState(GPT, progress=run_progress()), tmp_path, None)
    content = content_of(tmp_path)
    content["optimizer"] = optimizer
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert any(note.startswith(f"{UNREAD}{reason}") for note in found.notes)


@pytest.mark.parametrize("write", [write_megatron, write_distributed])
def test_optimizers_with_the_names_of_adams_state(write: Any, tmp_path: Path) -> None:
    """The state of ADOPT and others has Adam's names; the arguments say whose it is."""
    state = MemoryState(GPT, optimizer=True, progress=run_progress())
    write(state, tmp_path, None)
    (path,) = [*tmp_path.rglob(RANK_FILE), *tmp_path.rglob("common.pt")]
    content = torch.load(path, weights_only=False)
    for name, kinds in (("apex.FusedAdam", state.kinds), ("adopt", (WEIGHT,))):
        content["args"].optimizer = name
        torch.save(content, path)
        found = read_state(tmp_path)
        assert found.kinds == kinds
        assert (f"{UNREAD}it is that of `{name}`" in found.notes) == (name == "adopt")
