"""Null tokenizer: text that already consists of ids, for tests, timings, foreign vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.base.errors import ConfigError, DataError
from lmcore.contract.tokenizer import Tokenizer

__all__ = ["NullTokenizer"]


class NullTokenizer(Tokenizer):
    """Tokenizer of ids in decimal, separated by white space; the id V ends a document.

    An id of V or above is refused.  Megatron accepts it, and fails later in the embedding.

    Args:
        vocab_size: V, number of ids without the end of a document.

    Raises:
        ConfigError: V is out of range.
    """

    name = "NullTokenizer"
    encodes_any_text = False

    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size < 2**31 - 1:
            raise ConfigError(
                f"`--vocab-size {vocab_size}` is out of range",
                why="token ids are 32-bit integers from 0",
                hint="give a number from 1 to 2147483646",
            )
        self.eod: int = vocab_size
        self.vocab_size: int = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids in *text*.

        Raises:
            DataError: a word that is not an id below V.
        """
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
        """Return the type and V."""
        return {"type": self.name, "vocab_size": self.eod}


def _is_number(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True
