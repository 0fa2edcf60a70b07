"""Rank files: round trips over layouts and names, older versions, and bad files."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import time_limit
from megatron_files import RANK_FILE, edit, one_rank
from megatron_models import BIASED_LLAMA, GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.megatron.directory import is_megatron
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import Progress
from lmcore.model.shape import ModelShape

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_round_trip(
    shape: ModelShape, layout: tuple[int, int, int], style: str, tmp_path: Path
) -> None:
    """Every layout and every set of names gives back the same tensors, bit by bit."""
    progress = Progress(iteration=7, consumed_samples=70)
    state = MemoryState(shape, progress=progress, vocab_size=23)
    write_megatron(state, tmp_path, None, layout=Layout(*layout), style=style)
    found = MegatronState(tmp_path)
    assert_same(found, state)
    assert (found.vocab_size, found.progress) == (23, progress)
    assert is_megatron(tmp_path)
    assert is_megatron(tmp_path / "iter_0000007")
    tensor, pipeline, _ = layout
    files = sorted(one.parent.name for one in tmp_path.glob(f"iter_0000007/*/{RANK_FILE}"))
    assert len(files) == tensor * pipeline
    assert files[0] == ("mp_rank_00_000" if pipeline > 1 else "mp_rank_00")


def test_biases_and_scaled_rotary(tmp_path: Path) -> None:
    """Biases of a gated model, partial and scaled rotary embeddings come back."""
    state = MemoryState(BIASED_LLAMA)
    write_megatron(state, tmp_path, None, layout=Layout(2, 2))
    assert_same(MegatronState(tmp_path), state)


def test_stages_of_different_size(tmp_path: Path) -> None:
    """Layers are numbered by what the stages have, here 3 and 1."""
    state = MemoryState(GPT)
    write_megatron(state, tmp_path, None, layout=Layout(1, 2))
    paths = [tmp_path / "release" / f"mp_rank_00_00{stage}" / RANK_FILE for stage in (0, 1)]
    first, second = (torch.load(path, weights_only=False) for path in paths)
    prefix = "decoder.layers.0."
    for name in [name for name in second["model"] if name.startswith(prefix)]:
        inside = name.removeprefix(prefix)
        first["model"][f"decoder.layers.2.{inside}"] = second["model"].pop(name)
        second["model"][name] = second["model"].pop(f"decoder.layers.1.{inside}")
    for path, content in zip(paths, (first, second), strict=True):
        torch.save(content, path)
    assert_same(MegatronState(tmp_path), state)


def test_half_precision(tmp_path: Path) -> None:
    """Weights can be written in bfloat16, and are read in it."""
    state = MemoryState(GPT)
    write_megatron(state, tmp_path, None, dtype=torch.bfloat16)
    found = MegatronState(tmp_path)
    for name in state.parameters:
        assert found.dtype(name) == torch.bfloat16
        assert torch.equal(found.read(name), state.read(name).bfloat16())


def test_grouped_queries_in_an_old_order(tmp_path: Path) -> None:
    """A version without them is refused, and so is one that the file does not state."""
    path = one_rank(tmp_path, LLAMA)
    edit(path, lambda content: content.update(checkpoint_version=1.0))
    assert "`checkpoint_version` is 1;" in refusal(tmp_path)
    edit(path, lambda content: content.pop("checkpoint_version") and None)
    text = refusal(tmp_path)
    assert "does not say how its queries, keys and values are ordered" in text
    assert "`checkpoint_version` is 0, or missing" in text
    edit(path, lambda content: content.update(checkpoint_version=2.0))
    assert_same(MegatronState(tmp_path), MemoryState(LLAMA))


def test_names_of_the_oldest_version(tmp_path: Path) -> None:
    """`transformer` stacks, `attention` modules, nested embeddings and few arguments are read."""
    path = one_rank(tmp_path, style="legacy")
    state = MemoryState(GPT)

    def age(content: dict[str, Any]) -> None:
        model = content["model"]["language_model"]
        stack = model.pop("encoder")
        renamed = {
            "input_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        }
        renamed |= {"self_attention": "attention", "final_norm": "final_layernorm"}
        model["transformer"] = {
            ".".join(renamed.get(part, part) for part in name.split(".")): tensor
            for name, tensor in stack.items()
        }
        for name, tensor in model["transformer"].items():
            if "query_key_value" in name:
                by_head = tensor.reshape(4, 3, 4, *tensor.shape[1:])
                model["transformer"][name] = by_head.transpose(0, 1).reshape(tensor.shape)
        kept = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        args = {name: getattr(content["args"], name) for name in kept}
        args |= {"max_position_embeddings": 12, "model_parallel_size": 1}
        args |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
        content["args"] = argparse.Namespace(**args)
        del content["checkpoint_version"]

    edit(path, age)
    assert_same(MegatronState(tmp_path), state)


def refusal(tmp_path: Path) -> str:
    """Return the whole message with which a directory is refused."""
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    return f"{caught.value}\n{caught.value.why}\n{caught.value.hint}"


def test_missing_and_surplus_tensors_are_listed(tmp_path: Path) -> None:
    """Each is named; so is a wrong shape."""
    path = one_rank(tmp_path)

    def spoil(content: dict[str, Any]) -> None:
        model = content["model"]
        del model["decoder.layers.1.mlp.linear_fc2.bias"]
        model["decoder.layers.2.mlp.router.weight"] = torch.zeros(2)
        model["decoder.final_layernorm.weight"] = torch.zeros(3)
        model["decoder.layers.0.input_layernorm.weight"] = torch.zeros(16, dtype=torch.int8)

    edit(path, spoil)
    text = refusal(tmp_path)
    assert "`blocks.1.feed_forward.down_bias` is missing" in text
    assert "`decoder.layers.2.mlp.router.weight` in `mp_rank_00` is surplus" in text
    assert "`decoder.final_layernorm.weight` in `mp_rank_00` has shape [3] instead of [16]" in text
    assert "`decoder.layers.0.input_layernorm.weight` in `mp_rank_00` has dtype torch.int8" in text


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """A directory that was not copied is named, also the last one."""
    write_megatron(MemoryState(GPT), tmp_path, None, layout=Layout(2, 2))
    release = tmp_path / "release"
    (release / "mp_rank_01_001" / RANK_FILE).unlink()
    assert "missing: mp_rank_01_001" in refusal(tmp_path)
    (release / "mp_rank_00_001" / RANK_FILE).unlink()
    assert "missing: mp_rank_00_001, mp_rank_01_001" in refusal(tmp_path)


def test_ranks_of_several_checkpoints(tmp_path: Path) -> None:
    """A rank's file of another iteration is named."""
    for iteration in (1, 2):
        state = MemoryState(GPT, progress=Progress(iteration, iteration))
        write_megatron(state, tmp_path, None, layout=Layout(2))
    other = tmp_path / "iter_0000001/mp_rank_01" / RANK_FILE
    other.replace(tmp_path / "iter_0000002/mp_rank_01" / RANK_FILE)
    text = refusal(tmp_path)
    assert "is mixed from several checkpoints" in text
    assert "is of iteration 1" in text


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_of_experts(tensor: int, tmp_path: Path) -> None:
    """Without a pipeline they have the names of stages: the number of experts is named."""
    write_megatron(MemoryState(GPT), tmp_path, None, layout=Layout(tensor))
    for rank in range(tensor):
        plain_name = tmp_path / "release" / f"mp_rank_0{rank}"
        edit(plain_name / RANK_FILE, lambda content: setattr(content["args"], "num_experts", 8))
        shutil.copytree(plain_name, plain_name.with_name(f"mp_rank_0{rank}_001"))
        plain_name.rename(plain_name.with_name(f"mp_rank_0{rank}_000"))
    assert "`num_experts` is `8`" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["loop", "copies", "chain"])
def test_mappings_that_no_model_has(kind: str, tmp_path: Path) -> None:
    """One that contains itself, one that is there many times and a long chain are refused."""
    path = one_rank(tmp_path)
    inner: dict[str, Any] = {}
    if kind == "loop":
        inner["model"] = inner
    elif kind == "copies":
        for _ in range(30):
            inner = {"one": inner, "two": inner}
    else:
        for _ in range(40):
            inner = {"one": inner}
    with time_limit():
        edit(path, lambda content: content["model"].update(inner=inner))
        assert "its model is nested as no model is: `inner" in refusal(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    """A truncated file, a file of something else, and a wrong tracker are errors."""
    path = one_rank(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert str(path) in refusal(tmp_path)
    torch.save([1, 2], path)
    assert "it has `list` instead of a mapping" in refusal(tmp_path)
    torch.save({"model": {}}, path)
    assert "lacks the arguments" in refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("best\n")
    assert "it has `best` instead of an iteration" in refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("\n")
    assert "it is empty instead of an iteration" in refusal(tmp_path)
    assert f"such as `{path.parents[1]}`" in refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert "names `iter_0000012`, which has no files of Megatron" in refusal(tmp_path)
    assert "has no checkpoint of Megatron" in refusal(tmp_path / "nothing")
    assert not is_megatron(tmp_path)
    assert not is_megatron(tmp_path / "nothing")


def test_files_of_several_checkpoints(tmp_path: Path) -> None:
    """Without a tracker the user says which of several checkpoints is meant."""
    for iteration in (1, 2):
        state = MemoryState(GPT, progress=Progress(iteration, iteration))
        write_megatron(state, tmp_path, None)
    assert MegatronState(tmp_path).progress == Progress(2, 2)
    assert MegatronState(tmp_path / "iter_0000001").progress == Progress(1, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert "does not say which checkpoint is the newest" in refusal(tmp_path)


def test_older_torch_format(tmp_path: Path) -> None:
    """Files of torch before 1.6, which cannot be memory-mapped, are read as well."""
    path = one_rank(tmp_path)
    content = torch.load(path, weights_only=False)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert_same(MegatronState(tmp_path), MemoryState(GPT))


@pytest.mark.parametrize("layout", [(3, 1, 1), (1, 3, 1), (4, 1, 1), (1, 1, 2)], ids=str)
def test_layouts_that_do_not_divide(layout: tuple[int, int, int], tmp_path: Path) -> None:
    """A layout that cannot divide the model is refused before anything is written."""
    with pytest.raises(CheckpointError, match="cannot be written in this layout"):
        write_megatron(MemoryState(LLAMA), tmp_path, None, layout=Layout(*layout))
    assert not list(tmp_path.iterdir())


def test_vocabulary_that_ranks_cannot_divide(tmp_path: Path) -> None:
    """Rows of 0 are added to Megatron's number for the layout, and a note says so."""
    shape = replace(GPT, padded_vocab_size=23)
    state = MemoryState(shape, vocab_size=23)
    notes = write_megatron(state, tmp_path, None, layout=Layout(2))
    said = "233 rows of 0 are added to the vocabulary, for 2 ranks: losses differ"
    assert any(note.startswith(said) for note in notes)
    found = MegatronState(tmp_path)
    assert (found.shape.padded_vocab_size, found.vocab_size) == (256, 23)
    rows = found.read("token_embedding.weight")
    assert torch.equal(rows[:23], state.read("token_embedding.weight"))
    assert not rows[23:].any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_of_the_run(precision: str, tmp_path: Path) -> None:
    """It is a setting of the converted run; a note says if Adam's state is for another one."""
    state = MemoryState(GPT, optimizer=True, progress=Progress(7, 70))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert not any("precision" in note for note in write_megatron(state, tmp_path / "a", None))
    write_megatron(state, tmp_path / "half", None, dtype=dtype)
    found = MegatronState(tmp_path / "half")
    assert found.settings["precision"] == precision
    write_lmcore(found, tmp_path / "run", None)
    run = LmcoreState(tmp_path / "run")
    assert run.settings["precision"] == precision
    notes = write_megatron(run, tmp_path / "b", None)
    name = str(dtype).removeprefix("torch.")
    assert f"`--dtype {name}` writes it for `--{precision}`" in notes[0]
    notes = write_megatron(run, tmp_path / "c", None, dtype=dtype)
    assert not any("precision" in note for note in notes)
