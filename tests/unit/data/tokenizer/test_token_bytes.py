"""Bytes of tokens: joined, the bytes of a text's tokens are the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer, build_tokenizer
from lmcore.data.tokenizer.token_bytes import token_bytes

TEXT = 'It\'s 3.5 km to the caf\u00e9;\n\t\u6f22\u5b57 \N{SAUROPOD}  {"a": [1, null]}'
REAL = {
    "gpt2": (
        "GPT2BPETokenizer",
        {"vocab_file": "gpt2/gpt2-vocab.json", "merge_file": "gpt2/gpt2-merges.txt"},
        "",
    ),
    "llama": ("Llama2Tokenizer", {"tokenizer_model": "mistral-v1/tokenizer.model.v1"}, " "),
}


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str, shared_data: Path) -> None:
    """SentencePiece puts a space before a text; otherwise the bytes are the text's."""
    kind, files, before = REAL[name]
    paths = {key: str(shared_data / "tokenizers" / file) for key, file in files.items()}
    tokenizer = build_tokenizer(kind, **paths)
    table = token_bytes(tokenizer)
    assert table is not None
    assert len(table) == tokenizer.vocab_size
    ids = tokenizer.encode(TEXT)
    found = [table[i] for i in ids]
    assert b"".join(one for one in found if one is not None) == (before + TEXT).encode()
    assert sum(one is None for one in found) == (name == "llama")  # the begin of a text
    assert tokenizer.eod is not None
    assert table[tokenizer.eod] is None
    known = [one for one in table if one is not None]
    assert {bytes([byte]) for byte in range(256)} <= set(known)


def test_bytes() -> None:
    """Each byte is a token; the end of a document is no text."""
    assert token_bytes(ByteTokenizer()) == [*(bytes([byte]) for byte in range(256)), None]


def test_types_without_bytes(shared_data: Path) -> None:
    """Words of WordPiece have spaces that depend on their neighbours."""
    path = str(shared_data / "tokenizers/bert-base-uncased/vocab.txt")
    assert token_bytes(build_tokenizer("BertWordPieceLowerCase", vocab_file=path)) is None
    assert token_bytes(NullTokenizer(10)) is None
