"""Text whose special tokens are encoded as such, for every type of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer, build_tokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.pretrained.special_text import role_tokens, special_encoder


def test_pretrained(
    make_pretrained: Callable[..., str], bert_pipeline: Callable[[], tokenizers.Tokenizer]
) -> None:
    """The library finds the tokens; the tokenizer itself still takes them for text."""
    path = make_pretrained(bert_pipeline(), {"eos_token": "[SEP]", "bos_token": "[CLS]"})
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_name_or_path=path)
    assert special_encoder(tokenizer)("a [SEP] b") == [
        *(bert_pipeline().token_to_id(one) for one in ("a", "[SEP]", "b")),
    ]
    assert 3 not in tokenizer.encode("a [SEP] b")[1:-1]
    assert role_tokens(tokenizer) == {"eos_token": "[SEP]", "bos_token": "[CLS]"}


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "GPTSentencePieceTokenizer"])
def test_sentence_piece(kind: str, llama_model: str) -> None:
    """The text between two tokens is encoded by itself, and no token is added."""
    tokenizer = build_tokenizer(kind, tokenizer_model=llama_model)
    plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=llama_model).encode
    found = special_encoder(tokenizer)("<s>the fox</s><s> dog")
    assert found == [1, *plain("the fox"), 2, 1, *plain(" dog")]
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert role_tokens(tokenizer) == roles


def test_bytes(tmp_path: Path) -> None:
    """The end of a document has GPT-2's spelling."""
    encode = special_encoder(ByteTokenizer())
    assert encode("a<|endoftext|>\nü") == [97, 256, 10, 0xC3, 0xBC]
    assert role_tokens(ByteTokenizer())["eos_token"] == "<|endoftext|>"
    tokens = {token: i for i, token in enumerate([*byte_alphabet(), "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    gpt2 = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    assert special_encoder(gpt2)("ab<|endoftext|>a") == [97, 98, 256, 97]


def test_no_special_tokens() -> None:
    """A tokenizer without special tokens encodes as it does elsewhere."""
    assert role_tokens(NullTokenizer(9)) == {}
    assert special_encoder(NullTokenizer(9))("3 4") == NullTokenizer(9).encode("3 4")
