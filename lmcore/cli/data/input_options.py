"""Conversion of the command-line options of input and sentences to options of the data path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from lmcore.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.cli.data.prepare_section import PrepareSection
    from lmcore.config.section.input import InputSection
    from lmcore.data.input.options import InputOptions
    from lmcore.data.prepare.sentence import SentenceOptions

__all__ = ["input_options", "sentence_options"]

_TAB = ("tab", "\\t")


def input_options(wanted: InputSection) -> InputOptions:
    """Return the input options of a section.

    Raises:
        ConfigError: `--delim` is not a single character.
    """
    from lmcore.data.input.options import InputOptions

    delimiter = "\t" if wanted.delim in _TAB else wanted.delim
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise ConfigError(
            f"`--delim {delimiter}` cannot separate fields",
            why="it must be one character, neither a quote nor a line end",
            hint="for example `--delim ';'`, or `--delim tab`",
        )
    return InputOptions(
        document_per=cast("Literal['file', 'line', 'paragraph']", wanted.document_per),
        delimiter=delimiter,
        quotes=wanted.quotes,
        header=wanted.header,
        max_document_bytes=wanted.max_document_mib << 20,
    )


def sentence_options(wanted: PrepareSection) -> SentenceOptions | None:
    """Return the sentence options of a section; None for whole documents.

    Raises:
        ConfigError: options that exclude or need each other.
    """
    if wanted.split_sentences and wanted.presplit_sentences:
        raise ConfigError(
            "`--split-sentences` and `--presplit-sentences` exclude each other",
            hint="`--presplit-sentences` is for texts with one sentence per line",
        )
    if not wanted.split_sentences and not wanted.presplit_sentences:
        _require_unset(wanted, ("sentence_splitter", "lang", "punkt_model", "keep_newlines"))
        return None
    from lmcore.data.prepare.sentence import SentenceOptions

    if wanted.presplit_sentences:
        _require_unset(wanted, ("sentence_splitter", "lang", "punkt_model"))
        return SentenceOptions(splitter="lines", keep_newlines=wanted.keep_newlines)
    return SentenceOptions(
        splitter=wanted.sentence_splitter or "punkt",
        lang=wanted.lang or "english",
        keep_newlines=wanted.keep_newlines,
        punkt_model=wanted.punkt_model,
    )


def _require_unset(wanted: PrepareSection, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(wanted, name):
            raise ConfigError(f"`--{name.replace('_', '-')}` needs `--split-sentences`")
