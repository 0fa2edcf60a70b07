"""Comparison of a tokenizer with the name of a type, which is all that some checkpoints record."""

from __future__ import annotations

from lmcore.config.tokenizer import BUILT_IN_TYPES

__all__ = ["may_be_same"]

_BYTES, _NUMBERS = "ByteTokenizer", "NullTokenizer"
"""Types without files."""
_PRETRAINED = frozenset(
    name for name, options in BUILT_IN_TYPES.items() if options is BUILT_IN_TYPES["HFTokenizer"]
)
"""Types that read a `tokenizer.json`, which any vocabulary can be written as."""
_SENTENCE_PIECE = frozenset(
    {"GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"}
)
"""Types that read a SentencePiece model."""


def may_be_same(recorded: str, given: str) -> bool:
    """Return False if a tokenizer is surely not the one that a checkpoint names.

    Types with files may have the same vocabulary under another name, such as a `vocab.json` that
    was written as a `tokenizer.json`; another program's types are not known here.

    Args:
        recorded: Type that the checkpoint names.
        given: Type of the tokenizer.
    """
    if recorded == given:
        return True
    names = {recorded, given}
    if _NUMBERS in names:
        return False
    if names & _PRETRAINED or names <= _SENTENCE_PIECE:
        return True
    return _BYTES not in names and not names <= BUILT_IN_TYPES.keys()
