"""Incremental decoding of tokens: a character is returned once all of its bytes are generated.

The last tokens of a prompt may be the first bytes of a character, which is then part of the text
after the prompt.
"""

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
        self._ids = _latest(tokenizer, prompt)
        before = tokenizer.decode(self._ids)
        self._unsure = _num_incomplete(before)
        """U+FFFD at the end of the prompt's text, which a further token may complete."""
        self._before = before[: len(before) - self._unsure]
        """Text of the tokens that has been returned, or is the prompt's."""
        self._num_new = 0
        """Tokens since all text had been returned."""

    def push(self, token: int) -> str:
        """Return the text that *token* completes; empty within a character."""
        self._ids.append(token)
        self._num_new += 1
        text = self._tokenizer.decode(self._ids)
        incomplete = _num_incomplete(text)
        if self._is_spoiled(text):
            if incomplete and self._num_new <= _MOST_INCOMPLETE:
                return ""
            text = self._alone()
            incomplete = _num_incomplete(text)
        piece = self._advance(text[: len(text) - incomplete])
        if not incomplete:
            self._num_new = 0
            self._forget()
        return piece

    def finish(self) -> str:
        """Return the remaining text; bytes that are no character become U+FFFD."""
        text = self._tokenizer.decode(self._ids)
        return self._advance(self._alone() if self._is_spoiled(text) else text)

    def _is_spoiled(self, text: str) -> bool:
        """Return True if bytes that are no character have changed the text before them.

        With `ByteFallback` of the `tokenizers` library one such byte, which a further token may
        complete, makes U+FFFD of each byte token in a row.
        """
        broken = text.count(_INCOMPLETE) > self._before.count(_INCOMPLETE)
        return broken and not text.startswith(self._before) and len(text) > len(self._before)

    def _alone(self) -> str:
        """Return the text of the new tokens by themselves, and drop those before."""
        self._ids = self._ids[-self._num_new :]
        self._before, self._unsure = "", 0
        return self._tokenizer.decode(self._ids)

    def _forget(self) -> None:
        """Drop old tokens, at a place where all text has been returned."""
        if len(self._ids) > _MOST_TOKENS:
            self._ids = _latest(self._tokenizer, self._ids)
            self._before = self._tokenizer.decode(self._ids)

    def _advance(self, text: str) -> str:
        start = _after_prompt(text, len(self._before), self._unsure)
        if len(text) > start:
            self._unsure = 0
            self._before = text
        return text[start:]


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of *tokens* after *prompt*.

    Args:
        tokenizer: Tokenizer that decodes the ids.
        prompt: Token ids of the prompt.
        tokens: Token ids after the prompt.
    """
    before, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    if _INCOMPLETE in text:  # it may have spoiled the text before it
        stream = TextStream(tokenizer, prompt)
        return "".join([*map(stream.push, tokens), stream.finish()])
    unsure = _num_incomplete(before)
    return text[_after_prompt(text, len(before) - unsure, unsure) :]


def _num_incomplete(text: str) -> int:
    """Return the number of characters at the end of a text that may be one incomplete character.

    Its bytes decode to one replacement character, or to one each; four are always complete.
    """
    return min(len(text) - len(text.rstrip(_INCOMPLETE)), _MOST_INCOMPLETE)


def _after_prompt(text: str, start: int, unsure: int) -> int:
    """Return where the text after a prompt begins in a text with both.

    Args:
        text: Text of the prompt and of further tokens.
        start: Length of the prompt's text without the characters that may be incomplete.
        unsure: Number of these; if the text still has some, no token completed them.
    """
    while unsure and text[start : start + 1] == _INCOMPLETE:
        start, unsure = start + 1, unsure - 1
    return start


def _latest(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the last tokens, as many as are decoded with the next one.

    They begin with a whole character: some decoders make U+FFFD of all that follow a part of one.
    """
    if len(ids) <= _MOST_TOKENS:
        return list(ids)
    kept = ids[-_MOST_TOKENS // 2 :]
    whole = tokenizer.decode(ids)
    starts = range(_MOST_INCOMPLETE + 1)
    start = next((one for one in starts if whole.endswith(tokenizer.decode(kept[one:]))), 0)
    return list(kept[start:])
