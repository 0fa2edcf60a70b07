"""Reads GPT-2's `vocab.json` and `merges.txt` in a thread, while numpy and the rest are loaded.

`lmcore data prepare` starts it as soon as it knows the files, and the tokenizer takes what it
gives; C++ leaves the interpreter free meanwhile.  Nothing here imports numpy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.data.native import builders

__all__ = ["END", "MAX_BYTES", "BpeContents", "BpePreload"]

END = "<|endoftext|>"
"""How GPT-2's vocabularies spell the end of a document."""

MAX_BYTES = 256 * 1024 * 1024
"""Larger files are no vocabulary and no merges."""


@dataclass(frozen=True)
class BpeContents:
    """What is in the two files.

    Attributes:
        vocabulary: Bytes of `vocab.json`.
        merges: Bytes of `merges.txt`.
        native: The encoder in C++, the greatest id and one, and the id of `END` or None.  None for
            all where C++ was not built, and where a file is not certainly
            right or the two do not certainly belong together.
    """

    vocabulary: bytes
    merges: bytes
    native: tuple[Any, int, int | None] | None

    @classmethod
    def of(cls, vocabulary: bytes, merges: bytes) -> BpeContents:
        """Build the encoder of what is in the two files."""
        make = getattr(builders, "ByteBpe", None)
        native = make.of_files(vocabulary, merges, END.encode()) if make is not None else None
        return cls(vocabulary, merges, native)


class BpePreload:
    """Reads the two files, from now on.

    Args:
        vocab_file: `vocab.json`.
        merge_file: `merges.txt`.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self._files = vocab_file, merge_file
        self._contents: BpeContents | None = None
        self._thread = threading.Thread(target=self._read, name="vocabulary", daemon=True)
        self._thread.start()

    def contents(self, vocab_file: str, merge_file: str) -> BpeContents | None:
        """Return what was read; None for other files, and where they could not be read."""
        if (vocab_file, merge_file) != self._files:
            return None
        self._thread.join()
        return self._contents

    def _read(self) -> None:
        try:
            vocabulary, merges = map(_content, self._files)
        except OSError:
            return  # the tokenizer finds out for itself, and says what is wrong
        if max(len(vocabulary), len(merges)) > MAX_BYTES:
            return  # so it does of this
        self._contents = BpeContents.of(vocabulary, merges)


def _content(path: str) -> bytes:
    with Path(path).open("rb") as stream:
        return stream.read(MAX_BYTES + 1)
