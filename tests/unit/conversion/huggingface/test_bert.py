"""BERT models in Hugging Face directories: round trips, old files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_plugin import with_deepspeed
from model_states import BERT, RandomState, bert_shape, same_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmcore.base.errors import CheckpointError, DataError
from lmcore.conversion.convert import compared_logits, convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.native.write import write_lmcore
from lmcore.data.tokenizer import tokenizer_from
from lmcore.model.shape import ModelShape

SHAPES = {
    "both heads": BERT,
    "masked head": bert_shape(bert_binary_head=False),
    "tanh": bert_shape(bert_gelu="tanh-all"),
    "one segment": bert_shape(bert_token_types=1),
}
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "paris",
    "is",
    "##s",
    "in",
    "fr",
    "##ance",
]


def changed(directory: Path, **values: Any) -> None:
    """Change values of a `config.json`; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path)


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Directory with both heads."""
    found = tmp_path / "model"
    found.mkdir()
    write_huggingface(RandomState(BERT), found, None)
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_round_trip_through_a_run(tmp_path: Path, shape: ModelShape) -> None:
    """A second export writes the same files as the first, byte by byte, and logits agree."""
    write_lmcore(RandomState(shape), tmp_path / "run", None)
    first = convert(tmp_path / "run", tmp_path / "first", "huggingface")
    again = convert(tmp_path / "first", tmp_path / "again", "lmcore")
    convert(tmp_path / "again", tmp_path / "second", "huggingface")
    assert first.agreement == again.agreement == "1e-6"
    assert again.fills_masks
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"config.json", "model.safetensors"} <= files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes(), name
    found = read_state(tmp_path / "again")
    assert found.shape == shape
    same_state(found, RandomState(shape))


@pytest.mark.parametrize("name", RandomState(BERT).parameters)
def test_the_comparison_finds_each_weight(name: str) -> None:
    """Rows in another order give other logits of one of the heads."""
    state, other = RandomState(BERT), RandomState(BERT)
    other.tensors[name, "weight"] = other.tensors[name, "weight"].roll(1, 0)
    with pytest.raises(CheckpointError, match="does not compute what the source does"):
        compared_logits(state, other)


def test_rows_of_padding_are_left_out(tmp_path: Path) -> None:
    """Of the embedding, and of the head's bias."""
    state = RandomState(BERT)
    state.vocab_size = 30
    write_huggingface(state, tmp_path, None)
    found = load_file(tmp_path / "model.safetensors")
    assert found["bert.embeddings.word_embeddings.weight"].shape == (30, BERT.hidden_size)
    assert torch.equal(found["cls.predictions.bias"], state.read("masked_head.bias")[:30])


def test_names_of_the_first_versions(directory: Path) -> None:
    """Files with `gamma`, `beta`, positions and copies of tied tensors, as the published ones."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [one for one in tensors if "LayerNorm" in one]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)
        embedding = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = embedding.clone()
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
        count = BERT.max_position_embeddings
        tensors["bert.embeddings.position_ids"] = torch.arange(count).unsqueeze(0)

    rewritten(directory, change)
    changed(directory, architectures=["BertForMaskedLM"])  # the tensors tell that it has both heads
    found = HuggingFaceState(directory)
    assert (found.shape, list(found.notes)) == (BERT, [])
    same_state(found, RandomState(BERT))


def test_a_pooler_without_its_head_is_named(directory: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("weight", "bias"):
            del tensors[f"cls.seq_relationship.{name}"]

    rewritten(directory, change)
    found = HuggingFaceState(directory)
    assert found.shape == SHAPES["masked head"]
    [note] = found.notes
    assert note == "not read: the model does not use `bert.pooler.dense.bias` and 1 other"


@pytest.mark.parametrize(
    "name,value,reason",
    [
        ("bert.pooler.dense.bias", None, "`bert.pooler.dense.bias` is missing"),
        ("bert.extra", torch.ones(3), "`bert.extra` is not part of such a model"),
        (
            "cls.predictions.decoder.weight",
            torch.ones(BERT.padded_vocab_size, BERT.hidden_size),
            "`cls.predictions.decoder.weight` differs from `bert.embeddings.word_embeddings",
        ),
        ("cls.predictions.bias", torch.ones(3), r"has shape \[3\] instead of \[32\]"),
    ],
)
def test_every_tensor_is_used(
    directory: Path, name: str, value: Tensor | None, reason: str
) -> None:
    """A tensor that is missing, surplus, of another shape or no copy is an error."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    rewritten(directory, change)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceState(directory)
    assert caught.match(reason)


@pytest.mark.parametrize(
    "values,reason",
    [
        ({"hidden_act": "relu"}, '`hidden_act` is `"relu"`'),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["BertModel"]}, "it is a `BertModel`, not a BERT with the head"),
        ({"architectures": ["BertForQuestionAnswering"]}, "`BertForQuestionAnswering`"),
        ({"num_attention_heads": 5}, "describes no model"),
    ],
)
def test_models_that_are_refused(directory: Path, values: dict[str, Any], reason: str) -> None:
    changed(directory, **values)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceState(directory)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "own,reason",
    [
        ({"bert_post_norm": False}, "norms before its branches instead of after them (pre-norm)"),
        ({"bert_gelu": "tanh"}, "GELU by tanh in its layers and by erf in its head"),
        ({"bert_token_types": 0}, "no embedding of segments"),
    ],
)
def test_runs_that_transformers_lacks(tmp_path: Path, own: dict[str, Any], reason: str) -> None:
    """The error says why, and how to train a model that it has."""
    with pytest.raises(CheckpointError) as caught:
        write_huggingface(RandomState(bert_shape(**own)), tmp_path, None)
    assert f"not `bert`: it has {reason}" in str(caught.value)
    assert "`--bert-post-norm --bert-gelu erf`" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_vocabulary_file(tmp_path: Path) -> None:
    """`vocab.txt` gives the ids of transformers: `[BOS]` and `[EOS]` do not follow it."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    settings = tokenizer_settings(tmp_path)
    assert settings is not None
    tokenizer = tokenizer_from(settings)
    assert (tokenizer.name, tokenizer.vocab_size) == ("BertWordPieceLowerCase", len(VOCABULARY))
    assert tokenizer.encode("Paris is in France") == [5, 6, 8, 9, 10]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}', encoding="utf-8")
    settings = tokenizer_settings(tmp_path)
    assert settings is not None
    assert tokenizer_from(settings).encode("Paris is") == [1, 6]


@pytest.mark.parametrize(
    "config", [{"strip_accents": False}, {"tokenizer_class": "BertJapaneseTokenizer"}]
)
def test_other_tokenizers_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DataError, match="does not have the tokenizer"):
        tokenizer_settings(tmp_path)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist", "megatron-deepspeed"])
def test_formats_without_its_names(tmp_path: Path, directory: Path, to: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(directory, tmp_path / "out", to)
    assert "cannot be written for Megatron" in caught.value.what
    assert not (tmp_path / "out").exists()
