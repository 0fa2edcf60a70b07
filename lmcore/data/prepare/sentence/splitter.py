"""Interface, options and construction of sentence splitters: Punkt, rules, and one line a sentence.

The packages of the splitters, and the module of Punkt, are loaded on demand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmcore.base.errors import ConfigError, MissingPackageError, suggestion

__all__ = ["SPLITTERS", "SentenceOptions", "SentenceSplitter", "build_splitter"]

SPLITTERS = ("punkt", "sentencex", "lines")
# NLTK's names of its Punkt models, and ISO 639 codes.
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
        splitter: one of `SPLITTERS`.
        lang: language, by NLTK's name (`english`) or ISO 639 code (`en`).
        keep_newlines: keep the white space after a sentence as part of it.
        punkt_model: directory of Punkt's tables; None: in NLTK's data.
    """

    splitter: str = "punkt"
    lang: str = "english"
    keep_newlines: bool = False
    punkt_model: str | None = None


@dataclass(frozen=True)
class LineSplitter:
    """Splitter of texts with one sentence per line (`--presplit-sentences`).

    Attributes:
        keep_newlines: keep the line end as part of a sentence.
    """

    keep_newlines: bool = False

    def split(self, text: str) -> Sequence[str]:
        """Return the lines that are not blank."""
        lines = text.split("\n")
        if self.keep_newlines:
            lines = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
        else:
            lines = [line.removesuffix("\r") for line in lines]
        return [line for line in lines if line.strip()]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        return {"splitter": "lines", "keep_newlines": str(self.keep_newlines)}


@dataclass(frozen=True)
class RuleSplitter:
    """Splitter with the rules and abbreviations of about 240 languages: the `sentencex` package.

    Attributes:
        lang: name or ISO 639 code; for a code without rules the package uses a related language.
        keep_newlines: keep the white space after a sentence as part of it.

    Raises:
        ConfigError: *lang* is neither a known name nor a code.
        MissingPackageError: `sentencex` is not installed.
    """

    lang: str
    keep_newlines: bool = False

    def __post_init__(self) -> None:
        _code_of(self.lang)
        try:
            import sentencex  # noqa: F401
        except ImportError:
            raise MissingPackageError(
                "sentencex",
                needed_for="`--sentence-splitter sentencex`",
                install="pip install sentencex",
            ) from None

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences; only white space of the text may be missing."""
        import sentencex

        sentences: list[str] = []
        for piece in sentencex.segment(_code_of(self.lang), text):
            if not self.keep_newlines:
                sentences.append(piece.strip())
            elif sentences and not piece.strip():  # the separator of paragraphs is a separate piece
                sentences[-1] += piece
            else:
                sentences.append(piece)
        return [sentence for sentence in sentences if sentence]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        from importlib.metadata import version  # imported on demand: 25 ms

        return {
            "splitter": "sentencex",
            "version": version("sentencex"),
            "lang": _code_of(self.lang),
            "keep_newlines": str(self.keep_newlines),
        }


def build_splitter(options: SentenceOptions) -> SentenceSplitter:
    """Build the splitter of *options*.

    Raises:
        ConfigError: an unknown splitter or language, or Punkt's tables are not installed.
        DataError: the tables are damaged.
        MissingPackageError: the package of the splitter is not installed.
    """
    if options.punkt_model is not None and options.splitter != "punkt":
        raise ConfigError(
            f"`--punkt-model` has no effect with `--sentence-splitter {options.splitter}`",
            hint="omit one of them",
        )
    match options.splitter:
        case "punkt":
            from lmcore.data.prepare.sentence.punkt import PunktSplitter, find_tables, read_tables

            model = options.punkt_model
            folder = Path(model) if model is not None else find_tables(_name_of(options.lang))
            return PunktSplitter(read_tables(folder), keep_newlines=options.keep_newlines)
        case "sentencex":
            return RuleSplitter(options.lang, options.keep_newlines)
        case "lines":
            return LineSplitter(options.keep_newlines)
        case unknown:
            raise ConfigError(
                f"unknown `--sentence-splitter {unknown}`", hint=suggestion(unknown, SPLITTERS)
            )


def _name_of(lang: str) -> str:
    """Return NLTK's name of a language given by name or code; an unknown name is returned as is.

    Raises:
        ConfigError: neither a plain word nor a known code.
    """
    lowered = lang.lower()
    name = _NAMES.get(lowered, lowered)
    if not _NAME.fullmatch(name):  # it becomes part of a path
        raise ConfigError(f"unknown `--lang {lang}`", hint=suggestion(lowered, _CODES))
    return name


def _code_of(lang: str) -> str:
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
