"""State of Adam in DeepSpeed's files: read whole, refused in part, and named if it is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout, edit, write
from megatron_models import GPT, LLAMA, MemoryState

from lmcore.base.errors import CheckpointError
from lmcore.conversion.state import ADAM, WEIGHT, ModelState, Progress
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed

Change = Callable[[dict[str, Any]], object]


def states(content: dict[str, Any]) -> dict[Any, Any]:
    """Return the state of the inner optimizer of ZeRO 1 or 3."""
    held = content["optimizer_state_dict"]
    found: dict[Any, Any] = held.get("base_optimizer_state", held.get("optimizer_state_dict"))
    return found["state"]


def clear(content: dict[str, Any]) -> None:
    """Remove the state, as before the first step."""
    states(content).clear()


def with_momentum(content: dict[str, Any]) -> None:
    """Replace the state by SGD's."""
    for state in states(content).values():
        momentum = state["exp_avg"]
        state.clear()
        state["momentum_buffer"] = momentum


def same_weights(found: ModelState, expected: ModelState) -> None:
    """Compare the weights, in the precision that was read."""
    assert found.kinds == (WEIGHT,)
    for name in expected.parameters:
        assert torch.equal(found.read(name), expected.read(name).to(found.dtype(name))), name


def read_all(path: Path) -> None:
    """Read every tensor of a checkpoint."""
    found = read_deepspeed(path)
    for name in found.parameters:
        for kind in found.kinds:
            found.read(name, kind)


def change_files(root: Path, pattern: str, change: Change) -> None:
    """Change the content of all files of the optimizer that match."""
    found = sorted((root / "global_step7").glob(pattern))
    assert found
    for path in found:
        edit(path, change)


@pytest.mark.parametrize(
    "layout",
    [Layout(zero=1, data=2), Layout(zero=3, data=2), Layout(1, 2, zero=1), Layout(2, zero=3)],
    ids=str,
)
def test_a_rank_without_the_state_is_refused(layout: Layout, tmp_path: Path) -> None:
    """A state that only some files have is an error; the weights can be read without it."""
    state = MemoryState(GPT, optimizer=True)
    write(state, tmp_path, layout)
    last = f"zero_pp_rank_{layout.data - 1}_mp_rank_0{layout.tensor * max(layout.stages, 1) - 1}"
    change_files(tmp_path, f"*{last}_optim*", clear)
    with pytest.raises(CheckpointError, match=f"{last}.* lacks the state of Adam") as caught:
        read_deepspeed(tmp_path)
    assert "--weights-only`" in (caught.value.hint or "")
    same_weights(read_deepspeed(tmp_path, weights_only=True), state)


@pytest.mark.parametrize("kind", ADAM)
def test_a_moment_of_another_size_is_refused(kind: str, tmp_path: Path) -> None:
    """A moment that is shorter than its weights, or missing in one group, names its file."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1))

    def shorten(content: dict[str, Any]) -> None:
        states(content)[1][kind] = states(content)[1][kind][:-7]

    change_files(tmp_path, "*optim*", shorten)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        read_deepspeed(tmp_path)
    assert f"its `{kind}` does not fit" in str(caught.value.why)
    change_files(tmp_path, "*optim*", lambda content: states(content)[1].pop(kind))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize(
    "change, why",
    [
        (clear, "ZeRO's partitions have no state of an optimizer"),
        (with_momentum, "ZeRO's partitions have `momentum_buffer` instead"),
    ],
)
@pytest.mark.parametrize("zero", [1, 3])
def test_partitions_without_any_state(zero: int, change: Change, why: str, tmp_path: Path) -> None:
    """The weights in float32 are read, and a note says what is there instead."""
    state = MemoryState(GPT, optimizer=True)
    write(state, tmp_path, Layout(zero=zero, data=2))
    change_files(tmp_path, "*optim*", change)
    found = read_deepspeed(tmp_path)
    same_weights(found, state)
    assert f"the state of Adam is not read: {why}" in found.notes
    assert not any("Adam" in note for note in read_deepspeed(tmp_path, weights_only=True).notes)


def test_lost_files_of_the_optimizer(tmp_path: Path) -> None:
    """Weights in float32 beside which the optimizer is missing are read with a note."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1, dtype=torch.float32))
    for path in (tmp_path / "global_step7").glob("*optim*"):
        path.unlink()
    [note] = read_deepspeed(tmp_path).notes
    assert note == (
        "the state of Adam is not read: there are no `*_optim_states.pt` beside the model's files"
    )


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    """Return the parameters of a universal checkpoint in `tmp_path`, with the state of Adam."""
    state = MemoryState(LLAMA, optimizer=True, progress=Progress(7, 70, optimizer_step=6))
    write_deepspeed(state, tmp_path, None)
    return tmp_path / "global_step7" / "zero"


def test_a_universal_checkpoint_without_the_state(universal: Path, tmp_path: Path) -> None:
    """The weights are read, and a note says that the state of Adam is missing."""
    for kind in ADAM:
        for path in universal.glob(f"*/{kind}.pt"):
            path.unlink()
    found = read_deepspeed(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert found.notes == [
        "the state of Adam is not read: the universal checkpoint has no `NAME/exp_avg.pt`"
    ]


def test_a_universal_checkpoint_with_a_part_of_the_state(universal: Path, tmp_path: Path) -> None:
    """It is refused, and read with the weights alone."""
    next(iter(sorted(universal.glob("*/exp_avg.pt")))).unlink()
    with pytest.raises(CheckpointError, match="is not complete") as caught:
        read_deepspeed(tmp_path)
    assert "Adam's state lacks 1 file" in str(caught.value.why)
    found = read_deepspeed(tmp_path, weights_only=True)
    same_weights(found, MemoryState(LLAMA, optimizer=True))


@pytest.mark.parametrize("name", ["fp32.pt", "exp_avg_sq.pt", "step.pt"])
@pytest.mark.parametrize(
    "size, why", [(0, "it is empty"), (300, "it is truncated"), (-1, "it is truncated")]
)
def test_a_truncated_file_of_a_universal_checkpoint(
    universal: Path, name: str, size: int, why: str, tmp_path: Path
) -> None:
    """It is named, with what it lacks."""
    path = min(universal.glob(f"*/{name}"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        read_all(tmp_path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value.why)


def test_a_tied_embedding_of_a_pipeline_is_compared(tmp_path: Path) -> None:
    """Its float32 copy, which has another name than its layer's file, must round to it."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(1, 2, zero=1))
    path = tmp_path / "global_step7" / "layer_01-model_00-model_states.pt"
    edit(path, lambda content: content["word_embeddings.weight"].add_(0.5))
    found = read_deepspeed(tmp_path)
    found.read("position_embedding.weight")
    with pytest.raises(CheckpointError, match="do not fit the model's"):
        found.read("token_embedding.weight")


def test_an_optimizer_with_the_names_of_adams_state(tmp_path: Path) -> None:
    """The arguments say whose it is; a note says that it is left out."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1), optimizer="adopt")
    found = read_deepspeed(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert found.progress == Progress(7, 70)
    assert "the state of its optimizer is not read: it is that of `adopt`" in found.notes


@pytest.mark.parametrize("step", [float("inf"), float("nan"), -1])
def test_a_step_that_is_no_number_of_updates(step: float, tmp_path: Path) -> None:
    """It is not known then; the state itself is read."""
    write(MemoryState(GPT, optimizer=True), tmp_path, Layout(zero=1))

    def spoil(content: dict[str, Any]) -> None:
        for state in states(content).values():
            state["step"] = torch.tensor(step)

    change_files(tmp_path, "*optim*", spoil)
    found = read_deepspeed(tmp_path)
    assert found.progress == Progress(7, 70)
    assert found.kinds == (WEIGHT, *ADAM)
