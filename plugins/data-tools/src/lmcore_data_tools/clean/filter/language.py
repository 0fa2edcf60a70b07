"""Step `language`: selection of documents by language, identified with py3langid."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from lmcore.base.errors import ConfigError, MissingPackageError, suggestion
from lmcore_data_tools.clean.document import Document, Drop, Verdict

__all__ = ["UNKNOWN", "LanguageStep"]

UNKNOWN = "unknown"
"""Language of a text without letters."""

_PIECE = 250
_NAMES = """\
af afrikaans am amharic ar arabic az azerbaijani be belarusian bg bulgarian bn bengali bs bosnian
ca catalan cs czech cy welsh da danish de german el greek en english eo esperanto es spanish
et estonian eu basque fa persian fi finnish fr french ga irish gl galician gu gujarati he hebrew
hi hindi hr croatian hu hungarian hy armenian id indonesian is icelandic it italian ja japanese
jv javanese ka georgian kk kazakh km khmer kn kannada ko korean ku kurdish ky kyrgyz la latin
lo lao lt lithuanian lv latvian mg malagasy mk macedonian ml malayalam mn mongolian mr marathi
ms malay mt maltese ne nepali nl dutch no norwegian pa punjabi pl polish ps pashto pt portuguese
ro romanian ru russian si sinhala sk slovak sl slovenian sq albanian sr serbian sv swedish
sw swahili ta tamil te telugu th thai tl tagalog tr turkish uk ukrainian ur urdu vi vietnamese
xh xhosa zh chinese zu zulu"""
"""ISO 639-1 codes and English names of languages, for hints."""
_LETTER = re.compile(r"[^\W\d_]")


class LanguageStep:
    """Document step that drops documents in languages other than *wanted*, ISO 639-1 codes.

    Raises:
        MissingPackageError: py3langid is not installed.
        ConfigError: a language that py3langid does not have.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        if importlib.util.find_spec("py3langid") is None:
            raise MissingPackageError(
                "py3langid", needed_for="the step `language`", install="pip install py3langid"
            )
        self._wanted = frozenset(wanted)
        self._identifier = _load()
        known = frozenset(self._identifier.labels)
        for language in wanted:
            if language not in known:
                raise ConfigError(
                    f"`--languages {language}`: unknown language",
                    why="it must be an ISO 639-1 code of two letters",
                    hint=_hint(language, known),
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


def _hint(language: str, known: frozenset[str]) -> str:
    """Return a hint for an unknown language: the code of its English name, or similar codes."""
    words = _NAMES.split()
    code = dict(zip(words[1::2], words[::2], strict=True)).get(language.lower())
    return f"use `{code}`" if code in known else suggestion(language, known)
