"""Weight files from others: missing, surplus, damaged and hostile ones."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed_plugin import with_deepspeed
from model_states import GPT2, LLAMA, RandomState, same_state
from safetensors.torch import load_file, save_file

from lmcore.base.errors import CheckpointError
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.foreign_model import describe_foreign

SINGLE = "model.safetensors"


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a Hugging Face directory of a small Llama."""
    write_huggingface(RandomState(LLAMA), tmp_path, None)
    return tmp_path


def refused(directory: Path) -> str:
    """Return the error of reading a directory."""
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceState(directory)
    return str(caught.value)


def test_missing_surplus_and_misshapen_tensors_are_listed(directory: Path) -> None:
    tensors = load_file(directory / SINGLE)
    del tensors["model.norm.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(384, 25)
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(24, dtype=torch.int8)
    save_file(tensors, directory / SINGLE)
    text = refused(directory)
    assert "`model.norm.weight` is missing" in text
    assert "`model.layers.9.mlp.up_proj.weight` is not part of such a model" in text
    assert "`lm_head.weight` has shape [384, 25] instead of [384, 24]" in text
    assert "`model.layers.0.input_layernorm.weight` is quantized" in text


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated(directory: Path, cut: int) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:cut])
    assert "is damaged" in refused(directory)


def test_an_index_that_leads_elsewhere_or_is_not_complete(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "part.safetensors")
    index = directory / "model.safetensors.index.json"
    for name, reason in (
        ("../part.safetensors", "no file beside it"),
        ("other.safetensors", "`other.safetensors`, which is missing"),
        (7, "is damaged"),
    ):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert reason in refused(directory)
    index.write_text("[" * 100_000)
    assert "is damaged" in refused(directory)
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    same_state(HuggingFaceState(directory), RandomState(LLAMA))


def test_a_named_pipe_is_not_waited_for(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    assert "named pipe" in refused(directory)


def test_pickles_of_tensors(tmp_path: Path) -> None:
    """Older directories have `pytorch_model.bin`, with buffers, without the prefix of the head."""
    state = RandomState(GPT2)
    write_huggingface(state, tmp_path, None)
    tensors = load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["lm_head.weight"] = bare["wte.weight"]
    torch.save(bare, tmp_path / "pytorch_model.bin")
    same_state(HuggingFaceState(tmp_path), state)


def test_code_in_a_pickle_is_not_run(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {target}",)

    (directory / SINGLE).unlink()
    path = directory / "pytorch_model.bin"
    torch.save({"model.norm.weight": Evil()}, path)
    text = refused(directory)
    assert "is refused" in text
    assert "posix.system" in text
    assert "weights_only" not in text, "torch's advice to load without the restriction"
    path.write_bytes(pickle.dumps(Evil()))
    assert "is not a file of `torch.save`" in refused(directory)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10**6)
    assert "compressed" in refused(directory)
    torch.save([1, 2], path)
    assert "no mapping" in refused(directory)
    torch.save({"a": {"b": torch.ones(2)}}, path)
    assert "`a` is no tensor" in refused(directory)
    assert not target.exists()


def test_weights_in_two_forms(directory: Path) -> None:
    """The file is read that transformers reads, and a note names the other form."""
    part, index = directory / "part.safetensors", directory / "model.safetensors.index.json"
    other = {name: tensor + 1 for name, tensor in load_file(directory / SINGLE).items()}
    save_file(other, part)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, part.name)}))
    state = HuggingFaceState(directory)
    same_state(state, RandomState(LLAMA))
    (note,) = state.notes
    assert note.startswith(f"`{SINGLE}` is read, as by transformers")
    found = describe_foreign(directory)
    assert found is not None
    assert found.notes == (note,)
    (directory / SINGLE).unlink()
    assert HuggingFaceState(directory).notes == ()


def test_training_state_beside_the_model(directory: Path) -> None:
    """It is not read from a directory of transformers' `Trainer`, and a note says so."""
    (directory / "optimizer.pt").touch()
    assert HuggingFaceState(directory).notes == ("the state of its optimizer is not read",)
    (directory / "global_step5").mkdir()
    (directory / "global_step5/mp_rank_00_model_states.pt").touch()
    (note,) = HuggingFaceState(directory).notes
    assert "`--source-format megatron-deepspeed`" in note
