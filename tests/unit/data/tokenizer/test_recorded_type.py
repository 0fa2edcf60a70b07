"""Tokenizers beside the name of a type, as checkpoints of Megatron record it."""

from __future__ import annotations

import pytest

from lmcore.data.tokenizer.recorded_type import may_be_same


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
def test_types(recorded: str, given: str, expected: bool) -> None:
    """False only if no files of the second type can have the tokens of the first."""
    assert may_be_same(recorded, given) is expected
