"""What a splitter is, and what it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SentenceOptions", "SentenceSplitter"]


class SentenceSplitter(Protocol):
    """Cuts a text into sentences; can be pickled, and used by several threads."""

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences of *text*, in order; ones without tokens are dropped later."""

    def describe(self) -> dict[str, str]:
        """Return what decides its output: equal descriptions, equal sentences."""


@dataclass(frozen=True)
class SentenceOptions:
    """Which sentences are wanted.

    Attributes:
        splitter: A name in `lmcore.data.prepare.sentence.build.SPLITTERS`.
        lang: The language, as NLTK calls it (`english`) or by its ISO 639 code (`en`).
        keep_newlines: Whether the white space after a sentence stays part of it.
        punkt_model: Directory of Punkt's tables; None: NLTK's data, where it is installed.
    """

    splitter: str = "punkt"
    lang: str = "english"
    keep_newlines: bool = False
    punkt_model: str | None = None
