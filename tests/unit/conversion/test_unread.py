"""No tensor of a source is left out in silence: every change of one is read, refused or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_tensors import Content, is_noticed, observed, tensors_in, unnoticed
from megatron_files import edit, run_progress
from model_states import SHAPES, RandomState
from safetensors.torch import load_file, save_file

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import TensorEntry, save_streamed
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.foreign_model import describe_foreign
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.native.manifest import stored_name
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.conversion.unread import buffer_difference
from lmcore.families.layers.rotary import rotation_speeds
from lmcore.model.shape import ModelShape

# torch says that it saves in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # in torch 2.8 itself
]

GPT = ModelShape(2, 8, 2, 12, 12, 24)
LLAMA = replace(
    GPT,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    add_bias_linear=False,
)
TRAINED = RandomState(GPT, (WEIGHT, *ADAM))
TRAINED.progress = run_progress()
BF16 = torch.bfloat16


def huggingface(root: Path, shape: ModelShape, kind: str) -> None:
    """Write a tied model as older versions did: with its head, and with buffers."""
    write_huggingface(RandomState(shape), root, None)
    path = root / "model.safetensors"
    tensors = load_file(path)
    size = shape.max_position_embeddings
    if kind == "gpt2":
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        mask = torch.ones(size, size, dtype=torch.uint8).tril().view(1, 1, size, size)
        tensors |= {"transformer.h.1.attn.bias": mask}
        tensors |= {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        speeds = rotation_speeds(shape, torch.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = speeds
        tensors["model.rotary_emb.inv_freq"] = speeds.half()
    save_file(tensors, path)


def megatron_dist(root: Path) -> None:
    """Write `torch_dist` again by torch, with one tensor for each name."""
    write_distributed(TRAINED, root, None, dtype=BF16)


def megatron(root: Path) -> None:
    """Write rank files of two stages, with the buffers of older versions."""
    write_megatron(TRAINED, root, None, layout=Layout(2, 2), style="legacy", dtype=BF16)
    size = GPT.max_position_embeddings
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).tril()

    def add(content: dict[str, Any]) -> None:
        layers = content["model"]["language_model"]["encoder"]
        layers["layers.0.self_attention.attention.bias"] = mask

    for path in root.glob("*/mp_rank_*/*.pt"):
        edit(path, add)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "huggingface gpt2": lambda root: huggingface(root, GPT, "gpt2"),
    "huggingface llama": lambda root: huggingface(root, LLAMA, "llama"),
    "megatron": megatron,
    "megatron-dist": megatron_dist,
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", WRITERS)
def test_each_tensor_that_is_altered(name: str, every: bool, tmp_path: Path) -> None:
    """Replicas, copies of other stages, main parameters, heads, masks and frequencies too."""
    WRITERS[name](tmp_path)
    assert unnoticed(tmp_path, every=every) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_that_is_added(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    content, before = Content(tmp_path), observed(tmp_path)
    content.change(*content.places()[0], None)
    assert is_noticed(tmp_path, before)


@pytest.mark.parametrize("name", ["extra.weight", "optimizer.max_exp_avg_sq.final_norm.weight"])
def test_a_tensor_that_is_added_to_a_run(name: str, tmp_path: Path) -> None:
    """A note names it."""
    names = {stored_name(*key): key for key in TRAINED.tensors}
    entries = {
        one: TensorEntry("float32", tuple(TRAINED.tensors[key].shape)) for one, key in names.items()
    }
    tensors = {one: TRAINED.tensors[key] for one, key in names.items()} | {name: torch.ones(3)}
    save_streamed(
        tmp_path / "checkpoints",
        6,
        entries | {name: TensorEntry("float32", (3,))},
        tensors.__getitem__,
        {},
        model_shape=GPT.to_dict(),
    )
    state = read_state(tmp_path)
    (note,) = [*state.notes, *state.training_notes]
    assert note == f"not read: `{name}`"


TIED = {
    "gpt2": SHAPES["gpt2"],
    "llama": replace(SHAPES["llama"], untie_embeddings_and_output_weights=False),
    "qwen2": replace(SHAPES["qwen2"], untie_embeddings_and_output_weights=False),
}


def with_head(root: Path, shape: ModelShape, head: torch.Tensor | None) -> Path:
    """Write a tied model with another head; None: with its embedding as the head alone."""
    root.mkdir(exist_ok=True)
    write_huggingface(RandomState(shape), root, None)
    tensors = load_file(root / "model.safetensors")
    (name,) = tensors.keys() & {"transformer.wte.weight", "model.embed_tokens.weight"}
    tensors["lm_head.weight"] = tensors.pop(name) if head is None else head
    save_file(tensors, root / "model.safetensors")
    assert json.loads((root / "config.json").read_text())["tie_word_embeddings"] is True
    return root


@pytest.mark.parametrize("name", TIED)
def test_a_head_that_differs_unties(name: str, tmp_path: Path) -> None:
    """The reader, a run's settings and a converted model are untied, as in transformers 5."""
    head = torch.randn(384, 24, generator=torch.Generator().manual_seed(9))
    root = with_head(tmp_path / "in", TIED[name], head)
    state = read_state(root)
    assert state.shape == replace(TIED[name], untie_embeddings_and_output_weights=True)
    assert torch.equal(state.read("output_embedding.weight"), head)
    found = describe_foreign(root)
    assert found is not None
    assert not found.shape.tied
    assert "`lm_head.weight` differs from" in found.notes[0]
    convert(root, tmp_path / "out", "huggingface")
    assert not read_state(tmp_path / "out").shape.tied
    convert(root, tmp_path / "run", "lmcore", choice=TokenizerSettings("ByteTokenizer"))
    assert torch.equal(read_state(tmp_path / "run").read("output_embedding.weight"), head)


@pytest.mark.parametrize("name", TIED)
def test_a_rounded_head_unties(name: str, tmp_path: Path) -> None:
    """A head in bfloat16 of an embedding in float32 has other values, as in transformers 5."""
    embedding = RandomState(TIED[name]).read("token_embedding.weight")
    exact = embedding.bfloat16().float()
    assert not torch.equal(embedding, exact)
    root = with_head(tmp_path, TIED[name], embedding.bfloat16())
    assert not read_state(root).shape.tied


F8, UINT16 = torch.float8_e4m3fn, torch.uint16


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    """It is named, though torch cannot compare 8-bit floats with the embedding."""
    head = RandomState(GPT).read("token_embedding.weight").to(F8)
    with pytest.raises(CheckpointError) as caught:
        read_state(with_head(tmp_path, GPT, head))
    assert "`lm_head.weight` is quantized" in str(caught.value.why)


@pytest.mark.parametrize("dtype", [F8, UINT16])
@pytest.mark.parametrize("kind", ["bias", "position_ids", "masked_bias", "inv_freq"])
def test_a_buffer_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    """It differs, also where torch cannot compare it."""
    size = LLAMA.max_position_embeddings
    masks = {"bias": torch.ones(size, size).tril(), "masked_bias": torch.tensor([9.0])}
    buffer = masks.get(kind, torch.arange(size)).to(dtype)
    assert buffer_difference(kind, buffer, LLAMA) == f"has dtype {dtype}"


@pytest.mark.parametrize("name", TIED)
def test_either_name_of_a_tied_weight_serves(name: str, tmp_path: Path) -> None:
    state = read_state(with_head(tmp_path, TIED[name], None))
    assert state.shape == TIED[name]
    assert not state.notes
    expected = RandomState(TIED[name]).read("token_embedding.weight")
    assert torch.equal(state.read("token_embedding.weight"), expected)


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 2)], ids=["1", "2"])
@pytest.mark.parametrize("style", ["core", "legacy"])
def test_a_stage_with_another_copy_of_the_embedding(
    layout: Layout, style: str, tmp_path: Path
) -> None:
    """Megatron's arguments cannot say so: the error names both tensors and their files."""
    write_megatron(RandomState(GPT), tmp_path, None, layout=layout, style=style)
    path = max(tmp_path.glob("release/*_001/model_optim_rng.pt"))
    foreign = "output_layer.weight" if style == "core" else "word_embeddings_for_head"

    def change(content: dict[str, Any]) -> None:
        for keys in tensors_in(content["model"], ()):
            if foreign in keys:
                owner = content["model"]
                for key in keys[:-1]:
                    owner = owner[key]
                owner[keys[-1]] = owner[keys[-1]] + 1

    edit(path, change)
    with pytest.raises(CheckpointError, match="differs from") as caught:
        read_state(tmp_path)
    assert foreign in caught.value.what
    assert "word_embeddings.weight` in `mp_rank_" in caught.value.what
