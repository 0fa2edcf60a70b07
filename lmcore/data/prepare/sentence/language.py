"""Languages: NLTK's names of its Punkt models, and ISO 639 codes."""

from __future__ import annotations

import re

from lmcore.errors import ConfigError, suggestion

__all__ = ["code_of", "name_of"]

_CODES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
_NAMES = {code: name for name, code in _CODES.items()}
_CODE = re.compile("[a-z]{2,3}")
_NAME = re.compile("[a-z_]{3,40}")


def name_of(lang: str) -> str:
    """Return NLTK's name of a language given by name or code; an unknown name is returned as is.

    Raises:
        ConfigError: neither a plain word nor a known code.
    """
    lowered = lang.lower()
    name = _NAMES.get(lowered, lowered)
    if not _NAME.fullmatch(name):  # it becomes part of a path
        raise ConfigError(f"unknown `--lang {lang}`", hint=suggestion(lowered, _CODES))
    return name


def code_of(lang: str) -> str:
    """Return the ISO 639 code of a language given by name or code.

    Raises:
        ConfigError: neither a known name nor a code of two or three letters.
    """
    lowered = lang.lower()
    code = _CODES.get(lowered, lowered)
    if not _CODE.fullmatch(code):
        raise ConfigError(
            f"unknown `--lang {lang}`",
            why="it must be an ISO 639 code of two or three letters, such as `en`",
            hint=suggestion(lowered, _CODES),
        )
    return code
