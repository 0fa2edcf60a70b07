"""The tokenizer of text that already is ids, for tests, timings and foreign vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.data.tokenizer.base import Tokenizer
from lmcore.errors import ConfigError, DataError

__all__ = ["NullTokenizer"]


class NullTokenizer(Tokenizer):
    """Text is ids in decimal, separated by white space; the id V after the last ends a document.

    An id of V or above is refused: upstream writes it, and the embedding fails on it later.

    Args:
        vocab_size: V, the number of ids without the one that ends a document.
    """

    name = "NullTokenizer"
    encodes_any_text = False

    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size < 2**31 - 1:
            raise ConfigError(
                f"`--vocab-size {vocab_size}` is no size of a vocabulary",
                why="token ids are 32-bit numbers of 0 or above",
                hint="give a number from 1 to 2147483646",
            )
        self.eod: int = vocab_size
        self.vocab_size: int = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids that *text* spells."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            word = next(word for word in text.split() if not _is_number(word))
            raise DataError(
                f"`{word[:40]}` is not a token id",
                hint="`NullTokenizer` reads ids separated by white space",
            ) from None
        for i in ids:
            if not 0 <= i < self.eod:
                raise DataError(
                    f"token id {i} is outside the vocabulary",
                    why=f"ids go from 0 to {self.eod - 1}",
                )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return *ids* in decimal, separated by single spaces."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size}")
        return " ".join(str(i) for i in ids)

    def describe(self) -> dict[str, str | int | None]:
        """Return type and V."""
        return {"type": self.name, "vocab_size": self.eod}


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True
