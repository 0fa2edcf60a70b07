"""Round trips of Hugging Face directories without transformers; see `test_transformers.py`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
from model_states import GPT2, LLAMA, SHAPES, RandomState, same_state
from safetensors.torch import load_file, save_file

from lmcore.base.errors import CheckpointError, DataError
from lmcore.conversion.convert import convert
from lmcore.conversion.huggingface.directory import is_huggingface
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings, write_tokenizer
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_from
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("largest_file", [10**9, 9000], ids=["one file", "several"])
def test_what_is_written_is_read(tmp_path: Path, name: str, largest_file: int) -> None:
    state = RandomState(SHAPES[name])
    write_huggingface(state, tmp_path, None, largest_file=largest_file)
    assert is_huggingface(tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if largest_file == 10**9 else len(files) > 4
    found = HuggingFaceState(tmp_path)
    assert found.shape == state.shape
    same_state(found, state)


def test_half_precision(tmp_path: Path) -> None:
    state = RandomState(LLAMA)
    write_huggingface(state, tmp_path, None, dtype=torch.bfloat16)
    found = HuggingFaceState(tmp_path)
    for name in state.parameters:
        assert found.dtype(name) == torch.bfloat16
        assert torch.equal(found.read(name), state.read(name).bfloat16()), name


def test_padding_rows_are_left_out_and_the_tokenizer_comes_along(tmp_path: Path) -> None:
    state = RandomState(GPT2)
    state.vocab_size = 257
    notes = write_huggingface(state, tmp_path, ByteTokenizer())
    assert any("127 rows that pad the vocabulary" in note for note in notes)
    found = HuggingFaceState(tmp_path)
    assert found.shape.padded_vocab_size == 257
    assert torch.equal(
        found.read("token_embedding.weight"), state.read("token_embedding.weight")[:257]
    )
    assert found.tokenizer is not None
    tokenizer = tokenizer_from(found.tokenizer)
    text = "Ein Döner, 価格 5 €\n\tend  "
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens(tmp_path: Path) -> None:
    """A published model with more rows than tokens keeps its rows through a run."""
    (tmp_path / "published").mkdir()
    write_huggingface(RandomState(GPT2), tmp_path / "published", ByteTokenizer())
    assert convert(tmp_path / "published", tmp_path / "run", "lmcore").notes == []
    convert(tmp_path / "run", tmp_path / "back", "huggingface")
    for directory in ("published", "back"):
        config = json.loads((tmp_path / directory / "config.json").read_text(encoding="utf-8"))
        assert config["vocab_size"] == GPT2.padded_vocab_size == 384
    same_state(HuggingFaceState(tmp_path / "back"), HuggingFaceState(tmp_path / "published"))


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"position_embedding_type": "none"}, "no positions instead of learned ones"),
        ({"add_bias_linear": False}, "not `gpt2`: it has no biases"),
        ({"normalization": "RMSNorm"}, "RMSNorm instead of LayerNorm"),
        ({"head_dim": 4}, "not `gpt2`: it has 12 channels in all heads instead of 24"),
        ({"num_query_groups": 1}, "not `gpt2`: it has 1 key head for 3 query heads"),
    ],
)
def test_a_model_that_transformers_lacks(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(CheckpointError, match="no supported architecture") as caught:
        write_huggingface(RandomState(replace(GPT2, **change)), tmp_path, None)  # type: ignore[arg-type]
    assert reason in str(caught.value.why)
    assert list(tmp_path.iterdir()) == []


def test_partial_rotation_alone_is_named(tmp_path: Path) -> None:
    """A Llama model that transformers lacks is refused with the one value that differs."""
    with pytest.raises(CheckpointError, match="no supported architecture") as caught:
        write_huggingface(RandomState(replace(LLAMA, rotary_percent=0.5)), tmp_path, None)
    first = str(caught.value.why).splitlines()[0]
    assert (
        first == "not `llama`: it has rotary positions in 0.5 of a head's channels instead of all"
    )


def test_dropout_that_a_configuration_leaves_out(tmp_path: Path) -> None:
    """It has the default of transformers; a note names one of the embeddings that differs."""
    names = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    write_huggingface(RandomState(GPT2), tmp_path, None)
    found = HuggingFaceState(changed(tmp_path, **dict.fromkeys(names, "absent")))
    assert (found.shape.attention_dropout, found.shape.hidden_dropout) == (0.1, 0.1)
    assert not any("embd_pdrop" in note for note in found.notes)
    found = HuggingFaceState(changed(tmp_path, embd_pdrop=0.0))
    [note] = [note for note in found.notes if "embd_pdrop" in note]
    assert "(`resid_pdrop`, 0.1) instead of their own (`embd_pdrop`, 0.0)" in note


def changed(directory: Path, **values: object) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return directory


@pytest.mark.parametrize(
    "kind,values,reason",
    [
        ("gpt2", {"activation_function": "relu"}, '`activation_function` is `"relu"`'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_layer": "two"}, "`num_layers` is `two`, not an integer"),
        ("llama", {"partial_rotary_factor": 0.5}, "it rotates a part"),
        ("gpt2", {"n_head": 5}, "not divisible"),
        ("llama", {"hidden_act": "gelu"}, "`hidden_act`"),
        ("llama", {"mlp_bias": True}, "feed-forward layers have biases"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("llama", {"rope_theta": 10000.5}, "whole numbers"),
        ("llama", {"hidden_size": "absent"}, "`hidden_size` is missing"),
        ("llama", {"num_hidden_layers": 10**9}, "from 1 to"),
        ("llama", {"model_type": "mixtral"}, "`mixtral`"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt2", {"n_head": 5}, "hidden_size 24 is not divisible by num_attention_heads 5"),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "not a model for causal"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "are quantized"),
    ],
)
def test_a_configuration_that_lmcore_lacks(
    tmp_path: Path, kind: str, values: dict[str, object], reason: str
) -> None:
    write_huggingface(RandomState(SHAPES[kind]), tmp_path, None)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceState(changed(tmp_path, **values))
    assert reason in f"{caught.value.what} {caught.value.why}"


def test_both_spellings_of_the_rotary_settings(tmp_path: Path) -> None:
    """Transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    state = RandomState(SHAPES["llama scaled, wide heads"])
    write_huggingface(state, tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    changed(tmp_path, rope_parameters=settings, rope_scaling="absent", rope_theta="absent")
    assert HuggingFaceState(tmp_path).shape == state.shape


def test_biases_of_the_attention_only(tmp_path: Path) -> None:
    state = RandomState(SHAPES["llama tied, biases"])
    write_huggingface(state, tmp_path, None)
    with pytest.raises(CheckpointError, match=r"do not fit its `config\.json`"):
        HuggingFaceState(changed(tmp_path, mlp_bias=False))
    for name, weight in state.tensors.items():
        if ".feed_forward." in name[0] and name[0].endswith("bias"):
            weight.zero_()

    kept = {
        n: t
        for n, t in load_file(tmp_path / "model.safetensors").items()
        if "mlp" not in n or "bias" not in n
    }
    save_file(kept, tmp_path / "model.safetensors")
    found = HuggingFaceState(tmp_path)
    same_state(found, state)
    assert any("biases of 0" in note for note in found.notes)


@pytest.mark.parametrize("config", [None, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_model_of_sentencepiece(tmp_path: Path, config: dict[str, bool] | None) -> None:
    """Its texts begin with a token unless the configuration says that they do not."""
    (tmp_path / "tokenizer.model").touch()
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    settings = tokenizer_settings(tmp_path)
    assert settings is not None
    assert settings.tokenizer_type == "Llama2Tokenizer"
    assert settings.add_special_tokens is (False if config == {"add_bos_token": False} else None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        tokenizer_settings(tmp_path)


def test_end_tokens_of_a_model_are_written(tmp_path: Path) -> None:
    """The end tokens in a model's `config.json` are in the `generation_config.json` of a copy."""
    vocabulary = {"a": 0, "<end>": 1, "<turn>": 2}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    library.add_special_tokens(["<end>", "<turn>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2]}')
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_name_or_path=str(tmp_path))
    (tmp_path / "out").mkdir()
    state = RandomState(GPT2)
    state.vocab_size = 3
    write_huggingface(state, tmp_path / "out", tokenizer)
    found = HuggingFaceState(tmp_path / "out")
    assert found.tokenizer is not None
    assert end_tokens(tokenizer_from(found.tokenizer)) == {1, 2}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("gpt2", 1)


@pytest.mark.parametrize(
    "files,name,content",
    [
        ("vocab.json merges.txt", "config.json", {"model_type": "qwen2"}),
        ("vocab.json merges.txt", "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("vocab.json merges.txt", "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}),
        ("vocab.json merges.txt", "tokenizer_config.json", {"add_prefix_space": True}),
        ("vocab.json merges.txt", "tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer.model", "tokenizer_config.json", {"add_eos_token": True}),
        ("tokenizer.model", "tokenizer_config.json", {"add_prefix_space": False}),
    ],
)
def test_other_ids_of_an_older_layout_are_refused(
    tmp_path: Path, files: str, name: str, content: dict[str, object]
) -> None:
    """Files that transformers would read with other ids are refused, with a way out."""
    for file in files.split():
        (tmp_path / file).touch()
    assert tokenizer_settings(tmp_path) is not None
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not have the tokenizer") as caught:
        tokenizer_settings(tmp_path)
    assert "`tokenizer.json`" in str(caught.value.hint)
    usual = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": None, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(usual))
    assert tokenizer_settings(tmp_path) is not None


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_beside_an_older_layout_are_named(tmp_path: Path, place: str) -> None:
    """A note names the tokens that transformers adds, and that lmcore's tokenizer lacks."""
    write_huggingface(RandomState(GPT2), tmp_path, None)
    vocabulary = {character: i for i, character in enumerate(byte_alphabet())}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("")

    def write(tokens: dict[str, int]) -> None:
        numbered = {str(i): {"content": token} for token, i in tokens.items()}
        content = tokens if place == "added_tokens.json" else {"added_tokens_decoder": numbered}
        (tmp_path / place).write_text(json.dumps(content))

    write({"<|endoftext|>": 256})
    assert not any("tokenizer" in note for note in HuggingFaceState(tmp_path).notes)
    write({"<|endoftext|>": 256, "<sep>": 257})
    assert any(
        "`<sep>`, which transformers adds" in one for one in HuggingFaceState(tmp_path).notes
    )


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "GPTSentencePieceTokenizer"])
@pytest.mark.parametrize("bare", [True, False])
def test_the_begin_of_a_text_that_is_written(tmp_path: Path, kind: str, bare: bool) -> None:
    """A written model of SentencePiece begins texts as the tokenizer does that was written."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b", "b a"]),
        model_writer=model,
        vocab_size=8,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "any.model").write_bytes(model.getvalue())
    options = {"add_special_tokens": False} if bare and kind == "Llama2Tokenizer" else {}
    tokenizer = build_tokenizer(kind, tokenizer_model=str(tmp_path / "any.model"), **options)
    (tmp_path / "out").mkdir()
    write_tokenizer(tokenizer, tmp_path / "out", LLAMA)
    found = tokenizer_settings(tmp_path / "out")
    assert found is not None
    assert tokenizer_from(found).encode("a b") == tokenizer.encode("a b")
