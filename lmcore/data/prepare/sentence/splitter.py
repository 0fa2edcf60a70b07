"""Interface, options and construction of sentence splitters; their modules are loaded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmcore.errors import ConfigError, suggestion

__all__ = ["SPLITTERS", "SentenceOptions", "SentenceSplitter", "build_splitter"]

SPLITTERS = ("punkt", "sentencex", "lines")


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
            from lmcore.data.prepare.sentence.language import name_of
            from lmcore.data.prepare.sentence.punkt import PunktSplitter
            from lmcore.data.prepare.sentence.punkt_tables import find_tables, read_tables

            model = options.punkt_model
            folder = Path(model) if model is not None else find_tables(name_of(options.lang))
            return PunktSplitter(read_tables(folder), keep_newlines=options.keep_newlines)
        case "sentencex":
            from lmcore.data.prepare.sentence.rules import RuleSplitter

            return RuleSplitter(options.lang, options.keep_newlines)
        case "lines":
            return LineSplitter(options.keep_newlines)
        case unknown:
            raise ConfigError(
                f"unknown `--sentence-splitter {unknown}`", hint=suggestion(unknown, SPLITTERS)
            )
