"""Tokens of a text in pieces: as of the whole text, for tokenizers of all kinds."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer
from lmcore.evaluation import encode_pieces
from lmcore.evaluation.encode_pieces import encoded_pieces

TEXT = "".join(
    f"Line {n} isn't long; it has {n * n} words, or so.\n" + "\n" * (n % 4) + "é 中文。 " * (n % 3)
    for n in range(400)
)


def divided(text: str) -> list[str]:
    source, at, made = random.Random(2), 0, []
    while at < len(text):
        size = source.randint(1, 3000)
        made.append(text[at : at + size])
        at += size
    return made


@pytest.mark.parametrize("size", [300, 2000, 65536])
def test_bytes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_pieces, "PIECE", size)
    encode = ByteTokenizer().encode
    assert list(encoded_pieces(encode, divided(TEXT))) == encode(TEXT)
    assert list(encoded_pieces(encode, [TEXT])) == encode(TEXT)
    assert list(encoded_pieces(encode, [])) == []


@pytest.mark.parametrize("size", [300, 2000])
def test_a_token_before_every_text(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that begins each text with a token, and joins spaces with the word after."""
    monkeypatch.setattr(encode_pieces, "PIECE", size)

    def encode(text: str) -> list[int]:
        words = text.replace(" ", " \x00").split(" ")
        return [1, *(hash(word) for word in words)]

    assert list(encoded_pieces(encode, divided(TEXT))) == encode(TEXT)


def test_a_text_that_cannot_be_divided(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every token depends on the length of the text: it ends somewhere, with a warning."""
    monkeypatch.setattr(encode_pieces, "PIECE", 1000)
    monkeypatch.setattr(encode_pieces, "_LONGEST", 4000)
    sizes = []

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return [len(text)] * len(text)

    with caplog.at_level(logging.WARNING):
        assert len(list(encoded_pieces(encode, [TEXT]))) == len(TEXT)
    assert "no place where its tokens are surely divided" in caplog.text
    assert max(sizes) < 6000


FILES = {
    "GPT2BPETokenizer": {
        "vocab_file": "gpt2/gpt2-vocab.json",
        "merge_file": "gpt2/gpt2-merges.txt",
    },
    "Llama2Tokenizer": {"tokenizer_model": "mistral-v1/tokenizer.model.v1"},
    "GPTSentencePieceTokenizer": {"tokenizer_model": "t5/spiece.model"},
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("size", [300, 5000])
def test_real_tokenizers(
    kind: str, size: int, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's regular expression, and SentencePiece with a space before each text."""
    monkeypatch.setattr(encode_pieces, "PIECE", size)
    files = {name: str(shared_data / "tokenizers" / file) for name, file in FILES[kind].items()}
    encode = build_tokenizer(kind, **files).encode
    text = TEXT + (shared_data / "corpora/tinyshakespeare.txt").read_text()[:100_000]
    assert list(encoded_pieces(encode, divided(text))) == encode(text)
