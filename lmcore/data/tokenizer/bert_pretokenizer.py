"""The words that BERT's WordPiece looks up: cleaned, lower-cased, divided at punctuation.

The rules are those of the BERT release, which Megatron follows: control characters go, Chinese
characters and punctuation are words of their own, and for a lower-case vocabulary accents go too.
Character classes are Python's own (`unicodedata`), as there.  The normalizers of libraries differ
from it: they drop private and unassigned characters and lower-case sigma without its context.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["word_splitter"]

# Words of ASCII text without control characters: runs of letters and digits, or one sign.
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
    """Return the function from a text to its words.

    Args:
        lower_case: Whether letters are lower-cased and accents dropped.
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
            # A letter's lower case can depend on its neighbours, so that this comes first.
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(second).split()

    return split


class _Table(dict[int, str]):
    """A table for `str.translate` that is filled as characters come up."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        self[code] = replacement = self._rule(chr(code))
        return replacement


def _clean(character: str) -> str:
    """Drop what is invisible, make spaces one kind, set Chinese characters apart."""
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
    """Set punctuation apart; every sign of ASCII is some."""
    sign = character.isascii() and character.isprintable() and not character.isalnum()
    if (sign and character != " ") or unicodedata.category(character).startswith("P"):
        return f" {character} "
    return character


def _split_bare(character: str) -> str:
    """Do the same, and drop accents."""
    return "" if unicodedata.category(character) == "Mn" else _split(character)
