"""Bytes of each token of a vocabulary, for constraints on generated text.

Decoding one token at a time does not give them: a token may be part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer

__all__ = ["token_bytes"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None] | None:
    """Return the bytes of each id in a text; None for an id that is no text.

    None if the bytes of tokens of this type depend on other tokens: the text of a WordPiece token
    depends on the tokens before, and a plugin's type is not known.

    Args:
        tokenizer: Byte-level, SentencePiece, or a `tokenizer.json` of either kind.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [*(bytes([byte]) for byte in range(256)), None]
    if isinstance(tokenizer, GPT2BPETokenizer):
        return _byte_level(tokenizer.tokens_by_id, {-1 if tokenizer.eod is None else tokenizer.eod})
    if not isinstance(tokenizer, FileTokenizer):
        return None
    special = tokenizer.special_tokens()
    if any(_SPACE in one for one in tokenizer.spellings):
        return [
            None if number in special else _sentence_piece(one)
            for number, one in enumerate(tokenizer.spellings)
        ]
    if set(byte_alphabet()) <= set(tokenizer.spellings):
        return _byte_level(tokenizer.spellings, special)
    return None


def _byte_level(spellings: Sequence[str], special: Collection[int]) -> list[bytes | None]:
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    found: list[bytes | None] = []
    for number, one in enumerate(spellings):
        known = number not in special and one and all(character in byte_of for character in one)
        found.append(bytes(byte_of[character] for character in one) if known else None)
    return found


def _sentence_piece(spelling: str) -> bytes | None:
    byte = _BYTE.fullmatch(spelling)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return spelling.replace(_SPACE, " ").encode() or None
