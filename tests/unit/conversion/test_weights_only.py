"""Conversions of the weights alone: the model's own, whatever the optimizer's files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import Layout as DeepSpeedLayout
from deepspeed_files import edit
from deepspeed_files import write as write_deepspeed_files
from megatron_models import GPT, LLAMA, MemoryState

from lmcore.conversion.convert import convert
from lmcore.conversion.deepspeed.write import write_deepspeed
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import WEIGHT, ModelState, Progress
from lmcore.errors import CheckpointError

NAME = "blocks.0.feed_forward.up.weight"


def trained() -> MemoryState:
    """Return a model with the state of Adam, at step 7."""
    return MemoryState(GPT, optimizer=True, progress=Progress(7, 70, optimizer_step=6))


def converted(source: Path, target: Path) -> LmcoreState:
    """Return the run that the conversion of the weights alone writes."""
    done = convert(source, target, "lmcore", weights_only=True)
    assert not done.optimizer
    assert "the optimizer's state, if there is any, was left out: `--weights-only`" in done.notes
    assert not any("Adam" in note for note in done.notes)
    found = LmcoreState(target)
    assert found.kinds == (WEIGHT,)
    return found


def same_weights(found: ModelState, expected: ModelState, dtype: torch.dtype) -> None:
    """Compare all weights with the weights of *expected*, rounded to a dtype."""
    for name in expected.parameters:
        assert torch.equal(found.read(name).float(), expected.read(name).to(dtype).float()), name


def spoil_main_parameters(root: Path) -> None:
    """Change the main parameters of the optimizer in rank files: other weights, and other sizes."""
    for path in root.glob("iter_0000007/*/model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        for group in content["optimizer"]["fp32_from_fp16_params"]:
            for tensor in group:
                tensor.add_(3.0)
        torch.save(content, path)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2)], ids=str)
def test_rank_files(layout: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Main parameters of another model are an error; the model's weights are read without them."""
    state = trained()
    write_megatron(state, tmp_path / "in", None, layout=layout, dtype=torch.bfloat16)
    spoil_main_parameters(tmp_path / "in")
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "in", tmp_path / "out", "lmcore")
    assert "--weights-only`" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, torch.bfloat16)
    # A run that begins with the weights does not need the optimizer.
    reader = WeightReader(tmp_path / "in")
    for name in state.parameters:
        assert torch.equal(reader.read(name), state.read(name).bfloat16()), name
    assert "the weights of the model itself are taken" in caplog.text


@pytest.mark.parametrize("zero", [1, 3])
def test_partitions_of_zero(zero: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ZeRO 1 they are the module's; with ZeRO-3 the partitions are the only weights."""
    state = trained()
    directory = write_deepspeed_files(state, tmp_path / "in", DeepSpeedLayout(zero=zero, data=2))
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
    directory = write_deepspeed_files(trained(), tmp_path / "in", DeepSpeedLayout(zero=1, data=2))
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


def test_a_damaged_distributed_optimizer(tmp_path: Path) -> None:
    """Its file is an error for a run that begins with the weights, too."""
    write_megatron(trained(), tmp_path / "in", None)
    (path,) = tmp_path.glob("in/iter_*/*/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    content["optimizer"] = {"optimizer": {"param_groups": [{"step": 6}]}}
    torch.save(content, path)
    path.with_name("distrib_optim.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"distrib_optim\.pt"):
        WeightReader(tmp_path / "in")


def test_moments_that_torch_dist_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights are read without the optimizer if a part of its state is not there."""
    state = trained()
    write_distributed(state, tmp_path / "in", None)
    names = DistributedState._named

    def lacking(self: DistributedState) -> Any:
        problems, stored = names(self)
        stored["exp_avg"].pop(NAME)
        return problems, stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedState, "_named", lacking)
        with pytest.raises(CheckpointError, match="do not fit") as caught:
            convert(tmp_path / "in", tmp_path / "out", "lmcore")
        assert "--weights-only`" in str(caught.value.hint)
        assert torch.equal(WeightReader(tmp_path / "in").read(NAME), state.read(NAME))
    assert "the weights of the model itself are taken" in caplog.text


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    """Its weights in float32 are read without its moments."""
    state = trained()
    (tmp_path / "in").mkdir()
    write_deepspeed(state, tmp_path / "in", None, dtype=torch.bfloat16)
    next(tmp_path.glob("in/global_step7/zero/*/exp_avg.pt")).write_bytes(b"damaged")
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, torch.float32)


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    """It has weights only; the optimizer's files beside them are not reported as unread."""
    state = MemoryState(LLAMA)
    (tmp_path / "in").mkdir()
    write_huggingface(state, tmp_path / "in", None)
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, torch.float32)


@pytest.mark.parametrize("to", ["lmcore", "megatron", "megatron-dist", "megatron-deepspeed"])
def test_a_run_of_lmcore(to: str, tmp_path: Path) -> None:
    """The written checkpoint has no state of the optimizer, and no settings of it."""
    state = trained()
    write_megatron(state, tmp_path / "in", None)
    convert(tmp_path / "in", tmp_path / "run", "lmcore")
    convert(tmp_path / "run", tmp_path / "out", to, weights_only=True)
    found = read_state(tmp_path / "out")
    assert found.kinds == (WEIGHT,)
    same_weights(found, state, torch.float32)
    assert found.progress is not None
    assert (found.progress.iteration, found.progress.consumed_samples) == (7, 70)
    assert (found.progress.optimizer_step, found.progress.adam) == (None, None)
    files = [path.name for path in (tmp_path / "out").rglob("*")]
    assert not any("exp_avg" in name or "optim_states" in name for name in files)
