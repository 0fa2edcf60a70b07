"""A tokenizer for arithmetic: one id for each character of a small alphabet."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.base.errors import DataError
from lmcore.contract.tokenizer import Tokenizer

__all__ = ["ArithmeticTokenizer", "make_tokenizer"]

_ALPHABET = "\n0123456789+-*= "
_ID_OF = {character: number for number, character in enumerate(_ALPHABET)}


class ArithmeticTokenizer(Tokenizer):
    """Ids 0-15 are the characters of the alphabet, 16 ends a document."""

    name = "ArithmeticTokenizer"
    vocab_size = len(_ALPHABET) + 1
    eod = len(_ALPHABET)
    encodes_any_text = False  # `lmcore data prepare` then names the document that cannot be

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*.

        Raises:
            DataError: A character is not in the alphabet.
        """
        try:
            return [_ID_OF[character] for character in text]
        except KeyError as missing:
            raise DataError(
                f"`{self.name}` cannot encode {missing}",
                why=f"its alphabet is {_ALPHABET!r}",
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*; the end of a document has none."""
        for one in ids:
            if not 0 <= one < self.vocab_size:
                raise ValueError(f"id {one} is outside the vocabulary of {self.vocab_size}")
        return "".join(_ALPHABET[one] for one in ids if one != self.eod)

    def describe(self) -> dict[str, str | int | None]:
        """Return what rebuilds it: the type alone, as it needs no file."""
        return {"type": self.name}


def make_tokenizer(
    *, vocab_file: str | None, merge_file: str | None, vocab_size: int | None
) -> ArithmeticTokenizer:
    """Return the tokenizer; it has no options."""
    del vocab_file, merge_file, vocab_size
    return ArithmeticTokenizer()
