"""Tokens of a text that is read in pieces: as of the whole text, in bounded memory.

A piece ends between two words where the tokenizer divides the text in any case, which is tried out
on the text around, and is encoded after the end of the piece before, whose tokens are left out.  So
a tokenizer that begins every text in another way is right, too.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator

__all__ = ["PIECE", "encoded_pieces"]

logger = logging.getLogger(__name__)

PIECE = 1 << 16
"""Characters of a piece."""
_AROUND = 256
"""Characters before and after the end of a piece by which it is tried out."""
_TRIED = 64
"""Ends that are tried out."""
_LONGEST = 1 << 22
"""Characters after which a piece ends where the tokens may differ."""

_Encode = Callable[[str], list[int]]


def encoded_pieces(encode: _Encode, pieces: Iterable[str]) -> Iterator[int]:
    """Yield the tokens of a text.

    Args:
        encode: Function that returns the tokens of a text.
        pieces: The text, divided anywhere.
    """
    held, before, size = "", "", PIECE
    slices = (one[at : at + PIECE] for one in pieces for at in range(0, len(one), PIECE))
    for piece in slices:
        held += piece
        while len(held) > size + _AROUND:
            end = _end(encode, held, size)
            if end is None and len(held) <= _LONGEST:
                size = min(2 * size, _LONGEST)
                continue
            if end is None:
                logger.warning(
                    "a text has no place where its tokens are surely divided: they may differ there"
                )
                end = _LONGEST - _AROUND
            yield from _after(encode, before, held[:end])
            before, held = held[max(0, end - _AROUND) : end], held[end:]
    yield from _after(encode, before, held)


def _after(encode: _Encode, before: str, text: str) -> list[int]:
    """Return the tokens of a text that follows another one."""
    if not before:
        return encode(text)
    if not text:
        return []
    left, both = encode(before), encode(before + text)
    # Else the end was one where tokens may differ.
    return both[len(left) :] if both[: len(left)] == left else encode(text)


def _end(encode: _Encode, text: str, size: int) -> int | None:
    """Return where the tokens of a text are divided, at most *size*; None if it is not found."""
    for end in itertools.islice(_ends(text, size), _TRIED):
        left = encode(text[max(0, end - _AROUND) : end])
        both = encode(text[max(0, end - _AROUND) : end + _AROUND])
        if both[: len(left)] == left:
            return end
    return None


def _ends(text: str, size: int) -> Iterator[int]:
    """Yield places to try out, the last first: before spaces between words, then any."""
    least = max(1, size // 2)
    between_words = (
        end
        for end in range(size, least, -1)
        if text[end] == " " and text[end - 1].isalnum() and text[end + 1].isalnum()
    )
    yield from itertools.islice(between_words, _TRIED // 2)
    breaks = (end for end in range(size, least, -1) if text[end - 1] in "\n\u3002.!?")
    yield from itertools.islice(breaks, _TRIED // 4)
    yield from range(size, least, -1)
