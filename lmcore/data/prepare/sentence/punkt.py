"""Sentence splitting by NLTK's Punkt, as in Megatron."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lmcore.data.prepare.sentence.punkt_tables import PunktTables
from lmcore.errors import MissingPackageError

__all__ = ["PunktSplitter"]

_MAX_CHARACTERS = 1_000_000  # as in Megatron, which splits longer texts there, even inside a word

# NLTK's pattern of a possible sentence end, with the white space after the period as part of the
# sentence; the word before the period is matched as in Megatron.
_KEEPING = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


class PunktSplitter:
    """Sentence splitter of NLTK.

    Source: Kiss and Strunk 2006, as implemented in `nltk.tokenize.punkt`.

    Args:
        tables: Punkt's parameters of the language.
        keep_newlines: keep the white space after a sentence as part of it.

    Raises:
        MissingPackageError: `nltk` is not installed.
    """

    def __init__(self, tables: PunktTables, *, keep_newlines: bool = False) -> None:
        self._tables, self._keep_newlines = tables, keep_newlines
        self._tokenizer = _tokenizer(tables, keep_newlines=keep_newlines)

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences."""
        sentences: list[str] = []
        for start in range(0, len(text), _MAX_CHARACTERS):
            sentences += self._tokenizer.tokenize(text[start : start + _MAX_CHARACTERS])
        return sentences

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        return {
            "splitter": "punkt",
            "tables": self._tables.fingerprint,
            "keep_newlines": str(self._keep_newlines),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._tables, self._keep_newlines)


def _rebuilt(tables: PunktTables, keep_newlines: bool) -> PunktSplitter:  # noqa: FBT001
    return PunktSplitter(tables, keep_newlines=keep_newlines)


def _tokenizer(tables: PunktTables, *, keep_newlines: bool) -> Any:
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise MissingPackageError(
            "nltk", needed_for="`--split-sentences`", install="pip install nltk"
        ) from None
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(tables.abbreviations)
    parameters.sent_starters = set(tables.starters)
    parameters.collocations = set(tables.collocations)
    parameters.ortho_context = defaultdict(int, tables.orthography)
    words = punkt.PunktLanguageVars()
    if keep_newlines:
        kept = {"_period_context_fmt": _KEEPING}
        words = type("KeepingLanguageVars", (punkt.PunktLanguageVars,), kept)()
    return punkt.PunktSentenceTokenizer(parameters, lang_vars=words)
