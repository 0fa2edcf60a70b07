"""Documents stored as text and read from disk one by one, through an offset index.

`PREFIX.text` has all documents, concatenated, in UTF-8.  `PREFIX.offsets` has the byte offset of
each document and the end of the last, int64, little-endian.  `PREFIX.text.json` is written last and
marks the two as complete.  The source of the text is not needed to read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import numpy as np

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import AtomicFile, write_atomically
from lmcore.base.errors import DataError
from lmcore.data.indexed.files import disk_errors
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = ["LazyText", "write_lazy_text"]

_MAX_BYTES = 1 << 20
_FORMAT = 1
_OFFSET = np.dtype("<i8")
_CHECKED = 1 << 22
_HINT = "remove it; it is created again from its source"


class LazyText:
    """Sequence of documents on disk.

    Args:
        prefix: first part of the names of the files, as for `write_lazy_text`.

    Attributes:
        source: description of the source, from the writer.

    Raises:
        DataError: missing or damaged files.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        text, offsets, description = _paths(prefix)
        try:
            described = json.loads(read_bounded_file(description, _MAX_BYTES))
            version, documents = int(described["format"]), int(described["documents"])
            size, self.source = int(described["bytes"]), str(described["source"])
            found = (text.stat().st_size, offsets.stat().st_size)
        except OSError as error:
            raise DataError(
                f"no text at `{prefix}`", why=f"`{error.filename}`: {error.strerror}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"cannot read `{description}`", why=repr(error), hint=_HINT) from None
        expected = (size, (documents + 1) * _OFFSET.itemsize)
        if version != _FORMAT or found != expected or documents < 0:
            raise DataError(
                f"the text at `{prefix}` is damaged",
                why=f"format {version}, files of {found} bytes; expected {_FORMAT}, {expected}",
                hint=_HINT,
            )
        self._offsets = np.asarray(np.memmap(offsets, dtype=_OFFSET, mode="r"))
        self._text = (
            np.asarray(np.memmap(text, dtype="u1", mode="r")) if size else np.empty(0, "u1")
        )
        self._files = MappedFiles(self._offsets, self._text)
        with self._files.reading("the offsets"):
            self._check_offsets(size)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> str:
        """Return document *i*.

        Raises:
            IndexError: there is no such document.
            DataError: its bytes are not UTF-8: the file was changed; or a file was cut short.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        with self._files.reading(f"document {i}"):
            content = self._text[self._offsets[i] : self._offsets[i + 1]].tobytes()
        try:
            return str(content, "utf-8")
        except UnicodeDecodeError:
            raise DataError(
                f"document {i} of the text at `{self.prefix}` is not UTF-8",
                why="the file was changed after it was written",
                hint=_HINT,
            ) from None

    def __iter__(self) -> Iterator[str]:
        """Yield the documents in order."""
        return (self[i] for i in range(len(self)))

    def _check_offsets(self, size: int) -> None:
        ends = (int(self._offsets[0]), int(self._offsets[-1]))
        rising = all(
            bool((np.diff(self._offsets[at : at + _CHECKED + 1]) >= 0).all())
            for at in range(0, len(self), _CHECKED)
        )
        if ends != (0, size) or not rising:
            raise DataError(
                f"the text at `{self.prefix}` is damaged",
                why=f"its offsets do not increase from 0 to {size}",
                hint=_HINT,
            )


def write_lazy_text(documents: Iterable[str], prefix: str | Path, *, source: str) -> LazyText:
    """Write documents for `LazyText`, atomically.

    Args:
        documents: the documents, consumed one by one.
        prefix: first part of the names of the files.
        source: description of the source, to detect whether it has changed.

    Raises:
        DataError: the file system refuses.
    """
    with _Writer(prefix) as writer:
        for document in documents:
            writer.add(document)
        writer.finish(source)
    return LazyText(prefix)


class _Writer:
    """Writer of the files; a context manager that removes unfinished ones."""

    def __init__(self, prefix: str | Path) -> None:
        self._targets = _paths(prefix)
        self._documents = self._bytes = 0
        with disk_errors(self._targets[0]):
            self._targets[0].parent.mkdir(parents=True, exist_ok=True)
            self._targets[2].unlink(missing_ok=True)
            self._text, self._offsets = map(AtomicFile, self._targets[:2])
            self._offsets.stream.write(np.zeros(1, _OFFSET).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._text.close()
        self._offsets.close()

    def add(self, document: str) -> None:
        """Append a document."""
        raw = document.encode()
        self._documents += 1
        self._bytes += len(raw)
        with disk_errors(self._targets[0]):
            self._text.stream.write(raw)
            self._offsets.stream.write(np.array([self._bytes], _OFFSET).tobytes())

    def finish(self, source: str) -> None:
        """Rename the files to their final names, the description last."""
        described = {
            "format": _FORMAT,
            "documents": self._documents,
            "bytes": self._bytes,
            "source": source,
        }
        with disk_errors(self._targets[0]):
            for file in (self._text, self._offsets):
                file.finish()
            for file in (self._text, self._offsets):
                file.commit()
            write_atomically(self._targets[2], f"{json.dumps(described)}\n".encode())


def _paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Return the paths of text, offsets and description."""
    return Path(f"{prefix}.text"), Path(f"{prefix}.offsets"), Path(f"{prefix}.text.json")
