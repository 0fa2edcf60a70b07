"""`Completion`: the text of a continuation, piece by piece, and its end at a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcore.generation.text.stream import TextStream

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["Completion"]


class Completion:
    """Text after a prompt, without a stop text and everything after it.

    `update` is the rule `ends` of a `Request`.

    Attributes:
        text: Text so far that no later token changes; after `finish` all of it.
        stopped_by: Stop text that ended it; None: it has not been found.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """Begin with no text.

        Args:
            tokenizer: Tokenizer that decodes the ids.
            prompt: Token ids of the prompt.
            stop: Texts that end the completion, none of them empty.
        """
        self.text = ""
        self.stopped_by: str | None = None
        self._stream = TextStream(tokenizer, prompt)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._taken = 0

    def update(self, tokens: Sequence[int]) -> bool:
        """Take the tokens that are new in *tokens*; return True at a stop text."""
        for token in tokens[self._taken :]:
            self._add(self._stream.push(token))
        self._taken = len(tokens)
        return self.stopped_by is not None

    def finish(self, tokens: Sequence[int]) -> str:
        """Take the last tokens and return the whole text."""
        if not self.update(tokens):
            self._add(self._stream.finish())
        if self.stopped_by is None:
            self.text += self._held
            self._held = ""
        return self.text

    def _add(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        pending = self._held + piece
        found = [(at, stop) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text += pending[:at]
            self._held = ""
            return
        kept = self._possible_start(pending)
        self.text += pending[: len(pending) - kept]
        self._held = pending[len(pending) - kept :]

    def _possible_start(self, text: str) -> int:
        """Return the number of last characters that may begin a stop text."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
