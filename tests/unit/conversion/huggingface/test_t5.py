"""T5 models in Hugging Face directories: round trips, published forms, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import RandomState, same_state, t5_shape
from safetensors.torch import load_file, save_file
from suite.selection import peer
from torch import Tensor

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import compared_logits, convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.native.write import write_lmcore
from lmcore.model.shape import ModelShape

ORIGINAL = t5_shape(t5_scaled_head=True, t5_feed_forward="relu")
LATER = dataclasses.replace(
    t5_shape(t5_feed_forward="gated-gelu"), untie_embeddings_and_output_weights=True
)
SHAPES = {
    "original": ORIGINAL,
    "1.1": LATER,
    "silu": dataclasses.replace(
        t5_shape(t5_feed_forward="gated-silu", decoder_num_layers=0),
        untie_embeddings_and_output_weights=True,
    ),
}


def changed(directory: Path, **values: Any) -> None:
    """Change values of a `config.json`."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(config), encoding="utf-8")


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path)


def written(directory: Path, shape: ModelShape) -> Path:
    """Write a model with random weights."""
    directory.mkdir()
    write_huggingface(RandomState(shape), directory, None)
    return directory


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_round_trip_through_a_run(tmp_path: Path, shape: ModelShape) -> None:
    """A second export writes the same files as the first, byte by byte, and logits agree."""
    write_lmcore(RandomState(shape), tmp_path / "run", None)
    first = convert(tmp_path / "run", tmp_path / "first", "huggingface")
    again = convert(tmp_path / "first", tmp_path / "again", "lmcore")
    convert(tmp_path / "again", tmp_path / "second", "huggingface")
    assert first.agreement == again.agreement == "1e-6"
    assert not again.fills_masks
    assert again.generates
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name
    found = read_state(tmp_path / "again")
    assert found.shape == shape
    same_state(found, RandomState(shape))


@pytest.mark.parametrize("name", RandomState(LATER).parameters)
def test_the_comparison_finds_each_weight(name: str) -> None:
    """Rows in another order give other logits."""
    state, other = RandomState(LATER), RandomState(LATER)
    other.tensors[name, "weight"] = other.tensors[name, "weight"].roll(1, 0)
    with pytest.raises(CheckpointError, match="does not compute what the source does"):
        compared_logits(state, other)


def test_tokens_of_the_decoder(tmp_path: Path) -> None:
    """Without a tokenizer they are T5's."""
    directory = written(tmp_path / "model", ORIGINAL)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((directory / name).read_text(encoding="utf-8"))
        names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
        assert [found[one] for one in names] == [0, 1, 0]


@pytest.mark.parametrize("shape", [ORIGINAL, LATER], ids=["original", "1.1"])
def test_copies_and_leftovers(tmp_path: Path, shape: ModelShape) -> None:
    """Published files repeat the embedding, and the first T5's have a bias that nothing reads."""
    directory = written(tmp_path / "model", shape)
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        for stack in ("encoder", "decoder"):
            tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
        tensors[unused] = torch.ones(8, 3)

    rewritten(directory, change)
    found = HuggingFaceState(directory)
    assert found.shape == shape
    same_state(found, RandomState(shape))
    assert list(found.notes) == [f"not read: the model does not use `{unused}`"]


def test_mt5(tmp_path: Path) -> None:
    """It has the tensors of T5 1.1, and never divides the states before the head."""
    directory = written(tmp_path / "model", LATER)
    changed(
        directory,
        model_type="mt5",
        architectures=["MT5ForConditionalGeneration"],
        tie_word_embeddings=True,  # as transformers 5 writes it
        scale_decoder_outputs=None,
    )
    found = HuggingFaceState(directory)
    assert found.shape == LATER
    same_state(found, RandomState(LATER))


@pytest.mark.parametrize(
    "values,reason",
    [
        ({"feed_forward_proj": "gelu"}, '`feed_forward_proj` is `"gelu"`'),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["T5EncoderModel"]}, "it is a `T5EncoderModel`, not an encoder and"),
        ({"relative_attention_num_buckets": 2}, "describes no model"),
        ({"num_decoder_layers": 10**6}, "describes no model"),
    ],
)
def test_models_that_are_refused(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    """The error names the value."""
    directory = written(tmp_path / "model", ORIGINAL)
    changed(directory, **values)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceState(directory)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "own,reason",
    [
        ({"t5_scaled_attention": True}, "attention divided by the root"),
        ({"t5_head_bias": True}, "a bias in its head"),
        ({"t5_scaled_head": False}, "the token embedding's weights in its head, but does not"),
    ],
)
def test_runs_that_transformers_lacks(tmp_path: Path, own: dict[str, Any], reason: str) -> None:
    """The error says why, and how to train a model that it has."""
    with pytest.raises(CheckpointError) as caught:
        write_huggingface(RandomState(t5_shape(**{"t5_scaled_head": True} | own)), tmp_path, None)
    assert f"not `t5`: it has {reason}" in str(caught.value)
    assert "--no-t5-scaled-attention" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [ORIGINAL, LATER], ids=["original", "1.1"])
def test_transformers_reads_and_writes_it(tmp_path: Path, shape: ModelShape) -> None:
    """Its loader takes the directory as it is, and what it saves is the same model."""
    transformers = peer("transformers")
    directory = written(tmp_path / "model", shape)
    theirs, report = transformers.T5ForConditionalGeneration.from_pretrained(
        directory, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.generation_config.decoder_start_token_id == 0
    theirs.save_pretrained(tmp_path / "again")
    found = HuggingFaceState(tmp_path / "again")
    assert found.shape == dataclasses.replace(
        shape, max_position_embeddings=found.shape.max_position_embeddings
    )
    same_state(found, RandomState(shape))
