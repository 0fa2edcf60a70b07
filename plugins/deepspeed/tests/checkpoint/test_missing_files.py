"""Missing files of a pipeline's layers and of universal checkpoints: named, not their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_files import Layout, write
from megatron_models import GPT, LLAMA, MemoryState

from lmcore.base.errors import CheckpointError
from lmcore.conversion.huggingface.recipes import recipes_of
from lmcore.conversion.huggingface.write import config_of
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.directory import STYLES
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed


def reason(path: Path) -> str:
    """Return why a directory is refused as incomplete."""
    with pytest.raises(CheckpointError, match="is not complete") as caught:
        read_deepspeed(path)
    return str(caught.value.why)


@pytest.mark.parametrize("first", [2, 3], ids=["microsoft", "bigscience"])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_each_layer(shape: ModelShape, first: int, tmp_path: Path) -> None:
    """The embedding, the first, a middle and the last block, the final norm, the output."""
    directory = write(MemoryState(shape), tmp_path, Layout(stages=2, first_block=first))
    files = sorted(directory.glob("layer_*"))
    assert len(files) == (6 if shape.tied else 7)
    for file in files:
        content = file.read_bytes()
        file.unlink()
        assert reason(tmp_path) == f"1 file missing: `{file.name}`"
        file.write_bytes(content)


@pytest.fixture(params=STYLES)
def universal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the parameters of a universal checkpoint in `tmp_path`."""
    state = MemoryState(GPT, optimizer=True, progress=Progress(7, 70, optimizer_step=6))
    write_deepspeed(state, tmp_path, None, style=request.param)
    return tmp_path / "global_step7" / "zero"


def test_each_parameter(universal: Path, tmp_path: Path) -> None:
    """A weight's file is named, also if its directory is missing."""
    names = sorted(path.name for path in universal.glob("*/"))
    norm, embedding = (
        next(name for name in names if part in name)
        for part in ("post_attention_layernorm.bias", "word_embeddings")
    )
    for name in (norm, embedding):
        shutil.move(universal / name / "fp32.pt", tmp_path / "kept")
        assert reason(tmp_path) == f"1 file missing: `zero/{name}/fp32.pt`"
        shutil.move(tmp_path / "kept", universal / name / "fp32.pt")
    block = [name for name in names if name.startswith(("3.", "language_model.encoder.layers.1."))]
    for name in block:
        shutil.rmtree(universal / name)
    found = reason(tmp_path)
    assert found.startswith("12 files missing: ")
    assert all(f"`zero/{name}/fp32.pt`" in found for name in block[:2])
    assert found.endswith(" and 2 more")


def test_the_directory_of_parameters(universal: Path, tmp_path: Path) -> None:
    """A note names it; without `latest`, the checkpoint was chosen for it, and is refused."""
    missing = "its directory `zero` is missing"
    assert not any(missing in note for note in read_deepspeed(tmp_path).notes)
    shutil.rmtree(universal)
    expected = (
        f"`latest_universal` names `global_step7` as a universal checkpoint, but {missing}: its "
        "other files are read"
    )
    assert expected in read_deepspeed(tmp_path).notes
    (tmp_path / "latest").unlink()
    named = "`latest_universal` names it as a universal checkpoint"
    assert reason(tmp_path) == f"{named}, and {missing}"
    assert expected in read_deepspeed(universal.parent, weights_only=True).notes
    (tmp_path / "latest_universal").write_text("global_step7_universal")
    assert not any(missing in note for note in read_deepspeed(universal.parent).notes)
    (tmp_path / "latest_universal").write_text("../damaged")
    assert not any(missing in note for note in read_deepspeed(universal.parent).notes)


def test_of_a_model_of_transformers(tmp_path: Path) -> None:
    """It has the names of transformers; the configuration may be another model's."""
    state, directory = MemoryState(LLAMA), tmp_path / "global_step5"
    for name, recipe in recipes_of("llama", LLAMA).items():
        tensors = recipe.split(state.read(name, WEIGHT))
        for source, tensor in zip(recipe.sources, tensors, strict=True):
            (directory / "zero" / source).mkdir(parents=True)
            torch.save({"param": tensor.clone()}, directory / "zero" / source / "fp32.pt")
    torch.save({"global_steps": 5, "module": {}}, directory / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step5")
    config = config_of(LLAMA, dtype="bfloat16", eos=None, bos=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_deepspeed(tmp_path)
    shutil.rmtree(directory / "zero/model.layers.2.mlp.up_proj.weight")
    expected = "1 file missing: `zero/model.layers.2.mlp.up_proj.weight/fp32.pt`"
    assert reason(tmp_path) == expected
