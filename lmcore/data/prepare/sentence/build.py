"""Building a sentence splitter; its module is imported on demand."""

from __future__ import annotations

from pathlib import Path

from lmcore.data.prepare.sentence.base import SentenceOptions, SentenceSplitter
from lmcore.errors import ConfigError, suggestion

__all__ = ["SPLITTERS", "build_splitter"]

SPLITTERS = ("punkt", "sentencex", "lines")


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
            from lmcore.data.prepare.sentence.lines import LineSplitter

            return LineSplitter(options.keep_newlines)
        case unknown:
            raise ConfigError(
                f"unknown `--sentence-splitter {unknown}`", hint=suggestion(unknown, SPLITTERS)
            )
