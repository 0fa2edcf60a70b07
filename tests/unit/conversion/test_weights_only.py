"""Conversions of the weights alone: the model's own, whatever the optimizer's files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import LLAMA, MemoryState, trained
from weights_only import converted, require_weights_alone, same_weights

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import convert
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed

NAME = "blocks.0.feed_forward.up.weight"


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


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    """It has weights only; the optimizer's files beside them are not reported as unread."""
    state = MemoryState(LLAMA)
    (tmp_path / "in").mkdir()
    write_huggingface(state, tmp_path / "in", None)
    same_weights(converted(tmp_path / "in", tmp_path / "out"), state, torch.float32)


@pytest.mark.parametrize("to", ["lmcore", "megatron", "megatron-dist"])
def test_a_run_of_lmcore(to: str, tmp_path: Path) -> None:
    """The written checkpoint has no state of the optimizer, and no settings of it."""
    require_weights_alone(to, tmp_path)
