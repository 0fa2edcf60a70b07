"""Tokenizers of several types whose ids have the same tokens, and the names of types alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
)
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.comparison import may_be_same, same_tokens, token_difference

END = "<|endoftext|>"
VOCABULARY = {letter: byte for byte, letter in enumerate(byte_alphabet())} | {"he": 256, END: 257}


@pytest.fixture
def bpe(tmp_path: Path) -> Tokenizer:
    """Return a byte-level BPE of one merge."""
    return of_files(tmp_path, VOCABULARY)


def of_files(folder: Path, vocabulary: dict[str, int]) -> Tokenizer:
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps(vocabulary))
    files[1].write_text("#version: 0.2\nh e\n")
    return GPT2BPETokenizer(str(files[0]), str(files[1]))


def of_pipeline(folder: Path, kind: str, end: str = END) -> Tokenizer:
    vocabulary = {token: i for token, i in VOCABULARY.items() if token != END}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([end])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return build_tokenizer(kind, tokenizer_name_or_path=str(folder))


def test_types_of_the_same_tokens(tmp_path: Path, bpe: Tokenizer) -> None:
    found = [of_pipeline(tmp_path, kind) for kind in ("HFTokenizer", "HuggingFaceTokenizer")]
    assert len({one.fingerprint() for one in (bpe, *found)}) == 3
    for one in found:
        assert one.encode("the hen") == bpe.encode("the hen")
        assert same_tokens(one, bpe)
        assert same_tokens(bpe, one)
    assert same_tokens(*found)


def test_what_differs(tmp_path: Path, bpe: Tokenizer) -> None:
    """Tokens of one alone come first, then another order, then sizes; rules are not compared."""
    names = "a's", "b's"
    more = VOCABULARY | {f"[{i}]": 258 + i for i in range(5)}
    swapped = {**VOCABULARY, "a": VOCABULARY["b"], "b": VOCABULARY["a"]}
    assert token_difference(bpe, of_files(tmp_path, more), names) == (
        "only b's has `[0]`, `[1]`, `[2]` and 2 other tokens"
    )
    assert token_difference(of_pipeline(tmp_path, "HFTokenizer", end="</s>"), bpe, names) == (
        f"only a's has `</s>` and only b's has `{END}`"
    )
    assert token_difference(bpe, of_files(tmp_path, swapped), names) == (
        f"id {min(VOCABULARY['a'], VOCABULARY['b'])} is `a` in a's and `b` in b's"
    )
    numbers = NullTokenizer(9)
    assert token_difference(numbers, bpe, names) == (
        f"a's has {numbers.vocab_size} tokens and b's {bpe.vocab_size}"
    )
    assert token_difference(numbers, bpe, names, sizes=False) is None
    record = TokenizerIdentity(bpe.vocab_size, None)
    assert token_difference(record, bpe, names) == (
        "no id ends a document in a's and id 257 in b's"
    )
    assert token_difference(bpe, bpe, names) is None


def test_other_tokens(tmp_path: Path, bpe: Tokenizer) -> None:
    swapped = {**VOCABULARY, "a": VOCABULARY["b"], "b": VOCABULARY["a"]}
    others = [
        of_files(tmp_path, swapped),
        of_pipeline(tmp_path, "HFTokenizer", end="</s>"),
        ByteTokenizer(),
        NullTokenizer(bpe.vocab_size),
    ]
    assert not any(same_tokens(bpe, other) for other in others)
    null = NullTokenizer(9)
    assert not same_tokens(null, null), "its ids have no tokens"


def test_another_end_of_documents(tmp_path: Path, bpe: Tokenizer) -> None:
    same = of_pipeline(tmp_path, "HFTokenizer")
    same.eod = 0
    assert not same_tokens(bpe, same)


@pytest.mark.parametrize(
    "recorded,given,expected",
    [
        ("GPT2BPETokenizer", "GPT2BPETokenizer", True),
        ("GPT2BPETokenizer", "HuggingFaceTokenizer", True),
        ("BertWordPieceCase", "HFTokenizer", True),
        ("Llama2Tokenizer", "GPTSentencePieceTokenizer", True),
        ("TikTokenizer", "HFTokenizer", True),
        ("TikTokenizer", "GPT2BPETokenizer", True),
        ("GPT2BPETokenizer", "TypeOfAPlugin", True),
        ("HuggingFaceTokenizer", "ByteTokenizer", True),
        ("GPT2BPETokenizer", "NullTokenizer", False),
        ("TikTokenizer", "NullTokenizer", False),
        ("HFTokenizer", "NullTokenizer", False),
        ("NullTokenizer", "HFTokenizer", False),
        ("GPT2BPETokenizer", "ByteTokenizer", False),
        ("TikTokenizer", "ByteTokenizer", False),
        ("GPT2BPETokenizer", "Llama2Tokenizer", False),
        ("BertWordPieceCase", "BertWordPieceLowerCase", False),
    ],
)
def test_names_of_types(recorded: str, given: str, expected: bool) -> None:
    """False only if no files of the second type can have the tokens of the first."""
    assert may_be_same(recorded, given) is expected
