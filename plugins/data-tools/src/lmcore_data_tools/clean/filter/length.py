"""Step `length`: removal of short documents, by tokens or characters."""

from __future__ import annotations

from lmcore.base.errors import counted
from lmcore.data.tokenizer import Tokenizer
from lmcore_data_tools.clean.document import Document, Drop, Verdict

__all__ = ["CharactersStep", "TokensStep"]

# Megatron's bound: tokens hardly ever have so many characters on average.
_CHARACTERS_PER_TOKEN = 8


class CharactersStep:
    """Document step that drops documents of less than *minimum* characters."""

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the number of characters."""
        count = len(document.text)
        return Drop("short", counted(count, "character")) if count < self._minimum else None


class TokensStep:
    """Document step that drops documents of less than *minimum* tokens.

    As in Megatron's scripts, a text with eight characters per required token is kept without
    counting.
    """

    def __init__(self, minimum: int, tokenizer: Tokenizer) -> None:
        self._minimum = minimum
        self._tokenizer = tokenizer

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the number of tokens."""
        text = document.text
        if len(text) >= _CHARACTERS_PER_TOKEN * self._minimum:
            return None
        # Tokenizers refuse lone surrogates, which JSON can contain.
        sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        count = len(self._tokenizer.encode(sound))
        return Drop("short", counted(count, "token")) if count < self._minimum else None
