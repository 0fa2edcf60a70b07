"""Tasks of language modelling: texts that are predicted token by token, and ends of texts.

Texts of WikiText are split into words with marks between (`@-@`); a model that has read ordinary
text is given the text without them, and the words of the file are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.evaluation.files import json_rows, read_lines, read_pieces, read_text
from lmcore.evaluation.task import Continued, Stream, Task, Text, TextFile, within

__all__ = ["LANGUAGE", "plain_text", "wikitext_text"]

_HEADING = re.compile(r"^ = [^=].*[^=] = $")
_REPLACED = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" " + chr(176) + " ", chr(176)),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
"""Replacements of the usual detokenizer of WikiText, in order."""


def wikitext_text(text: str) -> str:
    """Return a text of WikiText as ordinary text.

    Args:
        text: Text with spaces around signs and `@` around those inside words.
    """
    for old, new in _REPLACED:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def plain_text(path: Path) -> Iterator[Text | TextFile]:
    """Yield the texts of a file: of each JSON line its `text`, otherwise all of it as one."""
    if ".jsonl" in path.suffixes or ".json" in path.suffixes:
        for row in json_rows(path):
            text = row.text("text", "page")
            yield Text(text, text)
        return
    empty = True
    for piece in read_pieces(path):
        if piece.strip():
            yield TextFile(path, lambda: read_pieces(path))
            return
        empty = False
    if not empty:
        raise DataError(f"`{path}` has no words", why="it has only spaces and ends of lines")


def _articles(path: Path) -> Iterator[Text]:
    """Yield each article of a WikiText file, which begins with a heading of the first level."""
    if ".jsonl" in path.suffixes:
        for row in json_rows(path):
            text = row.text("text", "page")
            yield Text(wikitext_text(text), text)
        return
    lines: list[str] = []
    for line in read_lines(path):
        if _HEADING.match(line.rstrip("\n")) and any(one.strip() for one in lines):
            yield _article(lines)
            lines = []
        lines.append(line)
    if any(one.strip() for one in lines):
        yield _article(lines)


def _article(lines: list[str]) -> Text:
    text = "".join(lines)
    return Text(wikitext_text(text), text)


def _stream(path: Path) -> Iterator[Stream]:
    """Yield a file of WikiText as Megatron reads it, with its number of words."""
    text = read_text(path)
    yield Stream(wikitext_text(text), len(text.strip().split(" ")) - 1)


def _last_words(path: Path) -> Iterator[Continued]:
    return _ends(path, whole=True)


def _last_tokens(path: Path) -> Iterator[Continued]:
    return _ends(path, whole=False)


def _ends(path: Path, *, whole: bool) -> Iterator[Continued]:
    for row in json_rows(path):
        context, space, word = row.text("text").rpartition(" ")
        if not context.strip() or not word:
            raise row.wrong("text", row.values["text"], "a text of several words")
        yield Continued(context, space + word, whole)


_WIKITEXT = ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity", "loss")
_LAMBADA = (*within("lambada*test*.jsonl"), *within("lambada*.jsonl"))
_LAMBADA_RELEASE = "the OpenAI processing of LAMBADA, `lambada_test.jsonl` with the field `text`"

LANGUAGE = (
    Task(
        "wikitext2",
        "Perplexity of the articles of WikiText-2's test set.",
        (
            *within("wikitext-2*/wiki.test.*"),
            *within("wikitext2*test*"),
            *within("wikitext-2*/wiki.valid.*"),
        ),
        _articles,
        _WIKITEXT,
        "the release of WikiText-2 (`wikitext-2/wiki.test.tokens`, or raw)",
    ),
    Task(
        "wikitext103",
        "Perplexity of the articles of WikiText-103's test set.",
        (*within("wikitext-103*/wiki.test.*"), *within("wikitext103*test*")),
        _articles,
        _WIKITEXT,
        "the release of WikiText-103 (`wikitext-103/wiki.test.tokens`, or raw)",
    ),
    Task(
        "wikitext103_stream",
        "Perplexity of WikiText-103's test set as one text, as Megatron's WIKITEXT103.",
        (*within("wikitext-103*/wiki.test.*"), *within("wikitext103*test*")),
        _stream,
        ("adjusted_perplexity", "token_perplexity", "loss"),
        "the release of WikiText-103 (`wikitext-103/wiki.test.tokens`, or raw)",
    ),
    Task(
        "lambada",
        "Last token of a passage that needs its whole context, as Megatron counts it.",
        _LAMBADA,
        _last_tokens,
        ("acc", "perplexity"),
        _LAMBADA_RELEASE,
    ),
    Task(
        "lambada_strict",
        "Last word of a passage that needs its whole context, all of its tokens.",
        _LAMBADA,
        _last_words,
        ("acc", "perplexity"),
        _LAMBADA_RELEASE,
    ),
)
