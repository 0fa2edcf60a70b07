"""Step `length`: leaves out short documents, by tokens or by characters."""

from __future__ import annotations

from lmcore.data.clean.document import Document, Drop, Verdict
from lmcore.data.tokenizer import Tokenizer

__all__ = ["CharactersStep", "TokensStep"]

# Upstream's bound, which it takes for certain: so many characters a token are hardly ever had.
_CHARACTERS_PER_TOKEN = 8


class CharactersStep:
    """Drops documents of less than *minimum* characters."""

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the number of characters."""
        count = len(document.text)
        return Drop("short", f"{count} characters") if count < self._minimum else None


class TokensStep:
    """Drops documents of less than *minimum* tokens.

    As in Megatron's scripts a text of eight characters for each token wanted is taken to have them,
    and not counted.
    """

    def __init__(self, minimum: int, tokenizer: Tokenizer) -> None:
        self._minimum = minimum
        self._tokenizer = tokenizer

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the number of tokens."""
        text = document.text
        if len(text) >= _CHARACTERS_PER_TOKEN * self._minimum:
            return None
        # Half a surrogate pair, which JSON can hold, is nothing that a tokenizer takes.
        sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        count = len(self._tokenizer.encode(sound))
        return Drop("short", f"{count} tokens") if count < self._minimum else None
