"""Step `language`: selection of documents by language, identified with py3langid."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from lmcore.data.clean.document import Document, Drop, Verdict
from lmcore.errors import ConfigError, MissingPackageError, suggestion

__all__ = ["UNKNOWN", "LanguageStep"]

UNKNOWN = "unknown"
"""Language of a text without letters."""

_PIECE = 250
_LETTER = re.compile(r"[^\W\d_]")


class LanguageStep:
    """Document step that drops documents in languages other than *wanted*, ISO 639-1 codes.

    Raises:
        MissingPackageError: py3langid is not installed.
        ConfigError: a language that py3langid does not know.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        if importlib.util.find_spec("py3langid") is None:
            raise MissingPackageError(
                "py3langid", needed_for="the step `language`", install="pip install py3langid"
            )
        self._wanted = frozenset(wanted)
        self._identifier = _load()
        known = set(self._identifier.labels)
        for language in wanted:
            if language not in known:
                raise ConfigError(
                    f"`--languages {language}`: unknown language",
                    why="it must be an ISO 639-1 code of two letters",
                    hint=suggestion(language, known),
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"_wanted": self._wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wanted = state["_wanted"]
        self._identifier = _load()

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the language as its reason."""
        language = self.language(document.text)
        return None if language in self._wanted else Drop(language)

    def language(self, text: str) -> str:
        """Return the language of *text*, identified from its beginning, middle and end."""
        if len(text) > 3 * _PIECE:
            middle = len(text) // 2 - _PIECE // 2
            pieces = text[:_PIECE], text[middle : middle + _PIECE], text[-_PIECE:]
            text = "\n".join(pieces)
        if not _LETTER.search(text):
            return UNKNOWN
        label, _ = self._identifier.classify(text)
        return str(label)


def _load() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
