"""BERT's normalization and pre-tokenization: from a text to the words that WordPiece looks up.

The rules of the BERT release, which Megatron follows: control characters are dropped, CJK
ideographs and punctuation are separate words, and an uncased vocabulary has neither capitals
nor accents.  Character classes are Python's own (`unicodedata`), as in the release.  The
`tokenizers` library differs: it drops private-use and unassigned characters, and lower-cases sigma
without its context.  `native/wordpiece.cpp` does the same from the tables of `character_page`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["character_page", "word_splitter"]

# Flags of `CharacterPage` in `native/wordpiece.hpp`.
_CASED, _TRANSPARENT, _FINAL_SIGMA, _LEFT, _SORTED = 1, 2, 4, 8, 16

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


def character_page(number: int, *, lower_case: bool) -> tuple[list[str], bytes]:
    """Return the rules of 256 characters for C++, where each character is replaced on its own.

    Args:
        number: the characters are those from 256 * *number* on.
        lower_case: lower-case letters and drop accents.

    Returns:
        The replacement of each character, with a space where a word ends, and its flags.
    """
    replacements, flags = [], bytearray(256)
    for i in range(256):
        character = chr(256 * number + i)
        cleaned = _clean(character)
        if lower_case:
            flags[i] = _sigma_flags(cleaned)
            cleaned = unicodedata.normalize("NFD", cleaned.lower())
            # NFD sorts neighboring marks of a text; few are left once accents are dropped.
            if any(unicodedata.combining(c) and unicodedata.category(c) != "Mn" for c in cleaned):
                flags[i] |= _SORTED
        rule = _split_bare if lower_case else _split
        parts = "".join(map(rule, cleaned))
        replacement = "".join(" " if c.isspace() else c for c in parts)
        if len(replacement.replace(" ", "")) > len(character.encode(errors="surrogatepass")):
            flags[i] |= _LEFT  # C++ reserves one id for each byte of a text
        replacements.append(replacement)
    return replacements, bytes(flags)


def _sigma_flags(cleaned: str) -> int:
    """Return the flags of a cleaned character for `str.lower` of a capital sigma near it.

    The Unicode properties Cased and Case_Ignorable are not in `unicodedata`.
    """
    if not cleaned:
        return _TRANSPARENT
    flags = _FINAL_SIGMA if cleaned == "\u03a3" else 0
    if (cleaned + "\u03a3").lower().endswith("\u03c2"):
        return flags | _CASED
    if len(cleaned) == 1 and ("A" + cleaned + "\u03a3").lower().endswith("\u03c2"):
        return flags | _TRANSPARENT
    return flags


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
