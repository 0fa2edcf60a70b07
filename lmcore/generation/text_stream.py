"""Incremental decoding of tokens: a character is returned once all of its bytes are generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["TextStream", "continuation"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_INCOMPLETE = 3
_MOST_TOKENS = 64
"""Tokens that are decoded again for each new one; the older half is dropped beyond this."""


class TextStream:
    """Text after a prompt, in pieces whose concatenation is the whole text.

    Args:
        tokenizer: Tokenizer that decodes the ids.
        prompt: Token ids of the prompt, whose text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoded with the tokens before: the text between two tokens may depend on both.
        self._ids = list(prompt)
        self._returned = len(tokenizer.decode(self._ids))
        self._forget()

    def push(self, token: int) -> str:
        """Return the text that *token* completes; empty within a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # The bytes of an incomplete character decode to one replacement character, or to one each;
        # four bytes are always complete.
        incomplete = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MOST_INCOMPLETE)
        piece = self._advance(text[: len(text) - incomplete])
        if not incomplete:
            self._forget()
        return piece

    def finish(self) -> str:
        """Return the remaining text; bytes that are no character become U+FFFD."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _forget(self) -> None:
        """Drop old tokens, at a place where all text has been returned."""
        if len(self._ids) > _MOST_TOKENS:
            del self._ids[: -_MOST_TOKENS // 2]
            self._returned = len(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return piece


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of *tokens* after *prompt*.

    Args:
        tokenizer: Tokenizer that decodes the ids.
        prompt: Token ids of the prompt.
        tokens: Token ids after the prompt.
    """
    before = len(tokenizer.decode(prompt))
    return tokenizer.decode([*prompt, *tokens])[before:]
