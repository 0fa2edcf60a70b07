"""BERT's normalization and pre-tokenization: from a text to the words that WordPiece looks up.

The rules of the BERT release, which Megatron follows: control characters are dropped, CJK
ideographs and punctuation are words of their own, and an uncased vocabulary has neither capitals
nor accents.  Character classes are Python's own (`unicodedata`), as in the release.  The
`tokenizers` library differs: it drops private-use and unassigned characters, and lower-cases sigma
without its context.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["word_splitter"]

# Words of ASCII text without control characters: runs of letters and digits, or one symbol.
_ASCII_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_ASCII_CONTROLS = {c: None for c in (*range(32), 127) if chr(c) not in "\t\n\r"}
_HAS_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CHINESE = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


def word_splitter(*, lower_case: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into words.

    Args:
        lower_case: lower-case letters and drop accents.
    """
    first = _Table(_clean)
    second = _Table(_split_bare if lower_case else _split)

    def split(text: str) -> list[str]:
        if text.isascii():
            if _HAS_CONTROLS.search(text):
                text = text.translate(_ASCII_CONTROLS)
            return _ASCII_WORDS.findall(text.lower() if lower_case else text)
        text = text.translate(first)
        if lower_case:
            # Before the rules for single characters: a letter's lower case can depend on its
            # neighbours.
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(second).split()

    return split


class _Table(dict[int, str]):
    """Table for `str.translate`, filled as characters are met."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = replacement = self._rule(chr(code))
        return replacement


def _clean(character: str) -> str:
    """Drop control characters, unify spaces, put spaces around CJK ideographs."""
    if character in "\t\n\r":
        return " "
    category = unicodedata.category(character)
    if character == "\ufffd" or category in {"Cc", "Cf"}:
        return ""
    if category == "Zs":
        return " "
    code = ord(character)
    chinese = any(first <= code <= last for first, last in _CHINESE)
    return f" {character} " if chinese else character


def _split(character: str) -> str:
    """Put spaces around punctuation, which includes every ASCII symbol."""
    sign = character.isascii() and character.isprintable() and not character.isalnum()
    if (sign and character != " ") or unicodedata.category(character).startswith("P"):
        return f" {character} "
    return character


def _split_bare(character: str) -> str:
    """Put spaces around punctuation and drop accents (combining marks)."""
    return "" if unicodedata.category(character) == "Mn" else _split(character)
