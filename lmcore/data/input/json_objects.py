"""Reader of JSON arrays of objects, and of objects over several lines.

Objects are parsed incrementally: an incomplete one is tried again with twice as much text, up to
the size limit of a document, so that an array may be larger than memory.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator

from lmcore.data.input.batch import TextBatch
from lmcore.data.input.compression import blocks, open_input
from lmcore.data.input.document import InputDocument, batch_documents, require_utf8, text_of
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument, too_long

__all__ = ["read"]

_SPACE = " \t\r\n"
_MARGIN = 16  # longer than any literal or escape that may be truncated at the end of the text
_KINDS = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
_REST = "fix the file; `--on-error skip` drops the rest of it, which cannot be parsed"


def read(file: InputFile, options: InputOptions) -> Generator[TextBatch, None, None]:
    """Yield the objects of *file*, up to the first one that is broken or too long.

    Raises:
        DamagedError: it cannot be read to its end; all complete objects before were yielded.
        DataError: it cannot be read at all.
    """
    with open_input(file.path) as opened:
        window = _Window(blocks(opened, options.batch_bytes), options.max_document_bytes)
        documents = _documents(window, options)
        yield from batch_documents(file, options, "object", documents, opened.position)


def _documents(window: _Window, options: InputOptions) -> Iterator[InputDocument]:
    number = 0
    in_array = window.skip("[")
    try:
        while not window.ends():
            if in_array and window.skip("]"):
                _require_end(window)
                return
            if in_array and number and not window.skip(","):
                raise window.broken("Expecting ',' or ']'")
            number += 1
            before = window.consumed
            value = window.value()
            found = _texts(value, options)
            yield InputDocument(number, window.consumed - before, found)
        if in_array:
            yield InputDocument(
                number + 1, 0, BadDocument("cut short", "the array has no end", _REST)
            )
    except BadDocument as bad:
        yield InputDocument(max(1, number), 0, bad)


def _texts(value: object, options: InputOptions) -> tuple[str, ...] | BadDocument:
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "a number")
        return BadDocument("broken JSON", f"a document is a JSON object, this is {kind}")
    try:
        texts = (text_of(value, key, options.key_flag(key)) for key in options.keys)
        return tuple(map(require_utf8, texts))
    except BadDocument as bad:
        return bad


def _require_end(window: _Window) -> None:
    if not window.ends():
        raise window.broken("Extra data after the end of the array")


class _Window:
    """Window over the text, refilled from the input."""

    def __init__(self, pieces: Iterator[bytes], bound: int) -> None:
        self._pieces, self._bound = pieces, bound
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._line = "", 0, 1
        self._complete = False
        self.consumed = 0

    def skip(self, character: str) -> bool:
        """Skip a character and white space before it; return False if it is not next."""
        if self.ends() or self._text[self._at] != character:
            return False
        self._advance(self._at + 1)
        return True

    def ends(self) -> bool:
        """Skip white space; return True at the end of the text."""
        while True:
            rest = len(self._text)
            at = self._at
            while at < rest and self._text[at] in _SPACE:
                at += 1
            self._advance(at)
            if at < rest:
                return False
            if not self._more(1):
                return True

    def value(self) -> object:
        """Return the next JSON value; raise `BadDocument` if it is invalid."""
        while not self.ends():
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or (
                    error.pos >= len(self._text) - _MARGIN
                )
                held = len(self._text) - self._at
                broken = self.broken(error.msg.removesuffix(" at"), error.pos)
                if cut and held > self._bound:
                    raise too_long(self._bound) from None
                if not cut or not self._more(held):
                    raise broken from None
            except RecursionError:
                raise BadDocument("broken JSON", "nested too deeply", _REST) from None
            except ValueError as error:  # a number of very many digits
                raise BadDocument("broken JSON", str(error), _REST) from None
            else:
                size = end - self._at
                self._advance(end)
                if size > self._bound:
                    raise too_long(self._bound)
                return value
        raise self.broken("The text ends where a value is expected,")

    def broken(self, message: str, at: int | None = None) -> BadDocument:
        """Return the exception for invalid text at index *at*, by default the current one."""
        index = self._at if at is None else at
        line = self._line + self._text.count("\n", self._at, index)
        return BadDocument("broken JSON", f"{message} at line {line} of the file", _REST)

    def _advance(self, at: int) -> None:
        self._line += self._text.count("\n", self._at, at)
        skipped = self._text[self._at : at]
        raw = skipped if skipped.isascii() else skipped.encode(errors="surrogateescape")
        self.consumed += len(raw)
        self._at = at

    def _more(self, wanted: int) -> bool:
        """Read at least *wanted* more characters; return False at the end of the input."""
        fresh: list[str] = []
        while wanted > 0 and not self._complete:
            piece = next(self._pieces, b"")
            self._complete = not piece
            fresh.append(self._decode(piece, final=self._complete))
            wanted -= len(fresh[-1])
        self._text = self._text[self._at :] + "".join(fresh)
        self._at = 0
        return any(fresh)
