"""Conversion of the command-line options of input and sentences to options of the data path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from lmcore.base.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.cli.data.prepare_section import PrepareSection
    from lmcore.config.section.input import InputSection
    from lmcore.data.input.options import InputOptions
    from lmcore.data.prepare.sentences import SentenceOptions

__all__ = ["input_options", "sentence_options"]

_TAB = ("tab", "\\t")


def input_options(section: InputSection) -> InputOptions:
    """Return the input options of a section.

    Raises:
        ConfigError: `--delim` is not a single character.
    """
    from lmcore.data.input.options import InputOptions

    delimiter = "\t" if section.delim in _TAB else section.delim
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise ConfigError(
            f"`--delim {delimiter}` cannot separate fields",
            why="it must be one character, neither a quote nor a line end",
            hint="for example `--delim ';'`, or `--delim tab`",
        )
    return InputOptions(
        document_per=cast("Literal['file', 'line', 'paragraph']", section.document_per),
        delimiter=delimiter,
        quotes=section.quotes,
        header=section.header,
        max_document_bytes=section.max_document_mib << 20,
    )


def sentence_options(section: PrepareSection) -> SentenceOptions | None:
    """Return the sentence options of a section; None for whole documents.

    Raises:
        ConfigError: options that exclude or need each other.
    """
    if section.split_sentences and section.presplit_sentences:
        raise ConfigError(
            "`--split-sentences` and `--presplit-sentences` exclude each other",
            hint="`--presplit-sentences` is for texts with one sentence per line",
        )
    if not section.split_sentences and not section.presplit_sentences:
        _require_unset(section, ("sentence_splitter", "lang", "punkt_model", "keep_newlines"))
        return None
    from lmcore.data.prepare.sentences import SentenceOptions

    if section.presplit_sentences:
        _require_unset(section, ("sentence_splitter", "lang", "punkt_model"))
        return SentenceOptions(splitter="lines", keep_newlines=section.keep_newlines)
    return SentenceOptions(
        splitter=section.sentence_splitter or "punkt",
        lang=section.lang or "english",
        keep_newlines=section.keep_newlines,
        punkt_model=section.punkt_model,
    )


def _require_unset(section: PrepareSection, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(section, name):
            raise ConfigError(f"`--{name.replace('_', '-')}` needs `--split-sentences`")
