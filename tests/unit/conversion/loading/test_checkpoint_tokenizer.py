"""Tokenizers of checkpoints that have only the name of one, as Megatron's do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from megatron_models import T5, MemoryState
from model_states import GPT2, RandomState

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import read_manifest
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, tokenizer_of
from lmcore.conversion.loading.foreign_model import describe_foreign
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.read import LmcoreState
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, NullTokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet

NULL = TokenizerSettings("NullTokenizer", vocab_size=300)


def named(tmp_path: Path, tokenizer_type: str | None, *, tokens: int | None = None) -> Path:
    """Write rank files whose arguments name a tokenizer."""
    state = RandomState(GPT2)
    state.vocab_size, state.tokenizer_type = tokens, tokenizer_type
    write_megatron(state, tmp_path / "in", None)
    return tmp_path / "in"


def byte_pairs(tmp_path: Path) -> TokenizerSettings:
    """Return the settings of a `GPT2BPETokenizer` of 257 ids, without the type."""
    vocabulary = {letter: number for number, letter in enumerate(byte_alphabet())}
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    return TokenizerSettings(
        vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
    )


def test_another_type_than_the_recorded_one(tmp_path: Path) -> None:
    """The error names both, also for a run that was converted without its tokenizer."""
    source = named(tmp_path, "GPT2BPETokenizer")
    convert(source, tmp_path / "run", "lmcore")
    for directory in (source, tmp_path / "run"):
        with pytest.raises(ConfigError, match="`NullTokenizer` is not the tokenizer of") as caught:
            convert(directory, tmp_path / "out", "lmcore", choice=NULL)
        assert caught.value.why == "the checkpoint names `GPT2BPETokenizer`"
        # Without the option there is no tokenizer: it cannot be left out.
        assert caught.value.hint == (
            "give the tokenizer that the model was trained with: "
            "`--tokenizer-type GPT2BPETokenizer --vocab-file FILE --merge-file FILE`"
        )
    assert not (tmp_path / "out").exists()


def test_the_recorded_type_is_the_default_of_given_files(tmp_path: Path) -> None:
    source = named(tmp_path, "GPT2BPETokenizer")
    found = tokenizer_of(read_state(source), byte_pairs(tmp_path))
    assert isinstance(found, GPT2BPETokenizer)
    assert found.vocab_size == 257


def test_missing_files_of_the_recorded_type(tmp_path: Path) -> None:
    """The hint names no type that the checkpoint rules out, and one that fits the given file."""
    source = named(tmp_path, "GPT2BPETokenizer")
    convert(source, tmp_path / "run", "lmcore")
    for state in (read_state(source), read_state(tmp_path / "run")):
        for choice in (
            TokenizerSettings("GPT2BPETokenizer"),
            TokenizerSettings(tokenizer_name_or_path="tokenizer.json"),
        ):
            with pytest.raises(ConfigError) as caught:
                tokenizer_of(state, choice)
            error = caught.value
            assert error.what == "`GPT2BPETokenizer` needs `--vocab-file` and `--merge-file`"
            assert error.why == "the checkpoint names `GPT2BPETokenizer`"
            assert "ByteTokenizer" not in str(error.hint)
            by_file = choice.tokenizer_name_or_path is not None
            assert ("add `--tokenizer-type PretrainedFromHF`" in str(error.hint)) == by_file


def test_a_type_without_files_needs_no_option(tmp_path: Path) -> None:
    """It is built from its name, and compared with what is given instead."""
    state = read_state(named(tmp_path, "ByteTokenizer"))
    assert isinstance(tokenizer_of(state), ByteTokenizer)
    assert not any("tokenizer" in note for note in state.notes)
    with pytest.raises(ConfigError, match="`NullTokenizer` is not the tokenizer of") as caught:
        tokenizer_of(state, NULL)
    assert str(caught.value.hint).endswith(", or leave the option out")
    found = describe_foreign(tmp_path / "in")
    assert found is not None
    assert found.tokenizer == TokenizerSettings("ByteTokenizer")


def test_numbers_of_another_size(tmp_path: Path) -> None:
    """Megatron records V of its `NullTokenizer`."""
    write_megatron(RandomState(GPT2), tmp_path / "in", NullTokenizer(300))
    state = read_state(tmp_path / "in")
    own = tokenizer_of(state)
    assert own is not None
    assert own.vocab_size == 301
    with pytest.raises(ConfigError, match="is not the tokenizer of") as caught:
        tokenizer_of(state, TokenizerSettings("NullTokenizer", vocab_size=256))
    assert "`NullTokenizer` of 257 ids" in caught.value.what
    assert caught.value.why == "the checkpoint names `NullTokenizer` of 301 ids"
    convert(tmp_path / "in", tmp_path / "run", "lmcore")
    run = LmcoreState(tmp_path / "run")
    assert run.vocab_size == 301
    assert run.manifest.meta["config"]["config"]["data"]["vocab_size"] == 300


def test_the_name_comes_along(tmp_path: Path) -> None:
    """Through a run and back to the other format, as long as nobody gives the tokenizer."""
    convert(named(tmp_path, "TikTokenizer"), tmp_path / "run", "lmcore")
    run = LmcoreState(tmp_path / "run")
    assert run.tokenizer_type == "TikTokenizer"
    convert(tmp_path / "run", tmp_path / "back", "megatron")
    [path] = (tmp_path / "back").rglob("model_optim_rng.pt")
    assert torch.load(path, weights_only=False)["args"].tokenizer_type == "TikTokenizer"
    choice = TokenizerSettings("ByteTokenizer")
    with pytest.raises(ConfigError, match="`ByteTokenizer` is not the tokenizer of"):
        convert(tmp_path / "run", tmp_path / "out", "lmcore", choice=choice)


def test_more_ids_than_tokens(tmp_path: Path) -> None:
    """Rows that pad the vocabulary were never trained."""
    state = read_state(named(tmp_path, None, tokens=257))
    with pytest.raises(ConfigError, match=r"has 301 ids; the model in .* has 257"):
        tokenizer_of(state, NULL)


def test_fewer_ids_than_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer that the user chose, of fewer tokens than recorded, is doubted."""
    state = read_state(named(tmp_path, None, tokens=320))
    tokenizer_of(state, NULL)
    assert "has 301 ids, and the model in" in caplog.text
    assert "has 320 tokens: if it is not the one" in caplog.text
    assert "scores mean nothing" in caplog.text


def test_settings_of_the_number_of_tokens(tmp_path: Path) -> None:
    """The number excludes rows of padding; checkpoint or tokenizer give it, if known."""

    def settings(name: str, source: Path, choice: TokenizerSettings = NO_CHOICE) -> object:
        convert(source, tmp_path / name, "lmcore", choice=choice)
        meta = read_manifest(LmcoreState(tmp_path / name).checkpoint).meta["config"]
        sections = meta["config"]
        return (
            sections["data"].get("vocab_size"),
            sections["model"]["make_vocab_size_divisible_by"],
            meta["derived"]["vocab_size"],
        )

    files = byte_pairs(tmp_path)
    source = named(tmp_path / "a", None, tokens=257)
    assert settings("tokens", source) == (257, 128, 257)
    assert settings("both", source, TokenizerSettings("ByteTokenizer")) == (None, 128, 257)
    unknown = named(tmp_path / "b", "GPT2BPETokenizer")
    assert settings("unknown", unknown) == (None, 384, None)
    assert settings("given", unknown, files) == (None, 128, 257)
    note = "all 384 rows of the vocabulary are written"
    done = convert(unknown, tmp_path / "hf", "huggingface")
    assert any(one.startswith(note) for one in done.notes)
    done = convert(unknown, tmp_path / "given hf", "huggingface", choice=files)
    assert not any(one.startswith(note) for one in done.notes)
    done = convert(tmp_path / "hf", tmp_path / "again", "huggingface")
    assert not any(one.startswith(note) for one in done.notes)


def test_a_t5_without_sentinels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The option that adds them is named with their number: prompts could not have them else."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    choice = TokenizerSettings("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))
    state = MemoryState(T5, vocab_size=18)
    state.tokenizer_type = "BertWordPieceCase"
    tokenizer_of(state, choice)
    assert "; `--vocab-extra-ids 10` adds the sentinels that it lacks" in caplog.text
    caplog.clear()
    found = tokenizer_of(state, dataclasses.replace(choice, vocab_extra_ids=10))
    assert found is not None
    assert (found.vocab_size, caplog.text) == (18, "")
    tokenizer_of(MemoryState(GPT2, vocab_size=18), choice)
    assert "--vocab-extra-ids" not in caplog.text
