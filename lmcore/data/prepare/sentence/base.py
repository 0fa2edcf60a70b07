"""Interface and options of sentence splitters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SentenceOptions", "SentenceSplitter"]


class SentenceSplitter(Protocol):
    """Sentence splitter; can be pickled, and is thread-safe."""

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences of *text*, in order; sentences without tokens are dropped later."""

    def describe(self) -> dict[str, str]:
        """Return the settings; splitters with equal settings give equal sentences."""


@dataclass(frozen=True)
class SentenceOptions:
    """Options of a sentence splitter.

    Attributes:
        splitter: one of `lmcore.data.prepare.sentence.build.SPLITTERS`.
        lang: language, by NLTK's name (`english`) or ISO 639 code (`en`).
        keep_newlines: keep the white space after a sentence as part of it.
        punkt_model: directory of Punkt's tables; None: in NLTK's data.
    """

    splitter: str = "punkt"
    lang: str = "english"
    keep_newlines: bool = False
    punkt_model: str | None = None
