"""Tokens to text while they come: a character is given out when all of its bytes are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["TextStream", "continuation"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_INCOMPLETE = 3


class TextStream:
    """The text that follows a prompt, piece by piece; the pieces joined are the whole.

    Args:
        tokenizer: Decodes the ids.
        prompt: Ids that come before; their text is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # All ids are decoded each time: a type may put something between two tokens.
        self._ids = list(prompt)
        self._given = len(tokenizer.decode(self._ids))

    def push(self, token: int) -> str:
        """Return the text that *token* completes; empty inside a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # The bytes of a character that is not complete yet decode to one replacement character, or
        # to one each; four bytes are always complete.
        broken = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MOST_INCOMPLETE)
        return self._advance(text[: len(text) - broken])

    def finish(self) -> str:
        """Return what is left; bytes that never became a character are U+FFFD."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of *tokens* as it stands after *prompt*."""
    before = len(tokenizer.decode(prompt))
    return tokenizer.decode([*prompt, *tokens])[before:]
