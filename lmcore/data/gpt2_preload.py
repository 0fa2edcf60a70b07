"""Preloading of GPT-2's `vocab.json` and `merges.txt` in a thread, while numpy is imported.

`lmcore data prepare` starts it as soon as the paths are known; the tokenizer takes the result.  C++
releases the interpreter's lock meanwhile.  Nothing here imports numpy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.threads import start_optional
from lmcore.data.native import builders

__all__ = ["END", "MAX_BYTES", "BpeContents", "BpePreload"]

END = "<|endoftext|>"
"""End-of-document token of GPT-2's vocabularies."""

MAX_BYTES = 256 * 1024 * 1024
"""Size above which a file cannot be a vocabulary or merges."""


@dataclass(frozen=True)
class BpeContents:
    """Contents of the two files.

    Attributes:
        vocabulary: bytes of `vocab.json`.
        merges: bytes of `merges.txt`.
        native: the C++ encoder, the size of the vocabulary, and the id of `END` or None.  None if
            C++ was not built, or does not accept the two files as certainly valid.
    """

    vocabulary: bytes
    merges: bytes
    native: tuple[Any, int, int | None] | None

    @classmethod
    def of(cls, vocabulary: bytes, merges: bytes) -> BpeContents:
        """Build the C++ encoder from the bytes of the two files."""
        make = getattr(builders, "ByteBpe", None)
        native = make.of_files(vocabulary, merges, END.encode()) if make is not None else None
        return cls(vocabulary, merges, native)


class BpePreload:
    """Reader of the two files in a background thread.

    Args:
        vocab_file: path of `vocab.json`.
        merge_file: path of `merges.txt`.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self._files = vocab_file, merge_file
        self._contents: BpeContents | None = None
        self._thread = threading.Thread(target=self._read, name="vocabulary", daemon=True)
        self._started = start_optional(self._thread)

    def contents(self, vocab_file: str, merge_file: str) -> BpeContents | None:
        """Return the contents; None for other files, or if they could not be read."""
        if (vocab_file, merge_file) != self._files:
            return None
        if not self._started:
            return None  # the tokenizer reads the files itself
        self._thread.join()
        return self._contents

    def _read(self) -> None:
        try:
            vocabulary, merges = map(_content, self._files)
        except OSError:
            return  # the tokenizer reads them again and raises the error
        self._contents = BpeContents.of(vocabulary, merges)


def _content(path: str) -> bytes:
    return read_bounded_file(path, MAX_BYTES)
