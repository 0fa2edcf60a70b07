"""Copy of ranges of documents into new datasets, for `lmcore data merge` and `lmcore data split`.

The kernel copies tokens, and indices are copied in pieces, so that memory does not grow with the
data.  Files are opened one after another, so that thousands can be merged.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles, disk_errors, file_changed
from lmcore.data.indexed.idx_reader import Index, read_index
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = ["DocumentRange", "DocumentRanges", "copy_bytes", "write_ranges"]

_CHUNK = 1 << 20
_COPY_BYTES = 1 << 26  # per system call: signals are handled between calls

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a dataset.

    Attributes:
        prefix: Path of the dataset without ending.
        first: First document.
        last: Document after the last.
        first_sequence, last_sequence: First sequence, and the one after the last.
        first_token, last_token: First token, and the one after the last.
        token_bytes: Size of a token in bytes.
        multimodal: True if the sequences have modes.
    """

    prefix: str
    first: int
    last: int
    first_sequence: int
    last_sequence: int
    first_token: int
    last_token: int
    token_bytes: int
    multimodal: bool

    @classmethod
    def of(cls, dataset: IndexedDataset, first: int = 0, last: int | None = None) -> DocumentRange:
        """Return documents *first* up to, not including, *last*; None for the dataset's end."""
        last = dataset.document_count if last is None else last
        begin, end = dataset.sequence_range((first, last))
        return cls(
            prefix=dataset.prefix,
            first=first,
            last=last,
            first_sequence=begin,
            last_sequence=end,
            first_token=dataset.index.start_of(begin),
            last_token=dataset.index.start_of(end),
            token_bytes=dataset.dtype.itemsize,
            multimodal=dataset.modes is not None,
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.last - self.first

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.last_sequence - self.first_sequence

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.last_token - self.first_token

    def open_index(self) -> Index:
        """Map the index again.

        Raises:
            DataError: The index has changed.
        """
        index = read_index(f"{self.prefix}.idx", verify=False)
        same = len(index.sizes) >= self.last_sequence and index.document_count >= self.last
        if not same or int(index.document_indices[self.last]) != self.last_sequence:
            raise file_changed(index.path)
        return index


class DocumentRanges:
    """Several ranges one after another, as the content of a new index (see `IndexContent`)."""

    def __init__(self, ranges: Sequence[DocumentRange]) -> None:
        self.ranges = tuple(ranges)
        self.sequences = sum(part.sequences for part in self.ranges)
        self.documents = sum(part.documents for part in self.ranges)
        self.tokens = sum(part.tokens for part in self.ranges)
        with_sequences = [part for part in self.ranges if part.sequences]
        self.multimodal = bool(with_sequences) and all(part.multimodal for part in with_sequences)

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in pieces."""
        for part in self.ranges:
            yield from _pieces(part.open_index().sizes, part.first_sequence, part.last_sequence)

    def document_ends(self) -> Iterator[Integers]:
        """Yield the last sequence + 1 of each document, in pieces."""
        before = 0
        for part in self.ranges:
            bounds = part.open_index().document_indices
            for piece in _pieces(bounds, part.first + 1, part.last + 1):
                yield piece - part.first_sequence + before
            before += part.sequences

    def modes(self) -> Iterator[Integers]:
        """Yield the mode of each sequence, in pieces."""
        for part in self.ranges:
            modes = part.open_index().modes
            if modes is not None:
                yield from _pieces(modes, part.first_sequence, part.last_sequence)


def write_ranges(files: IndexedFiles, ranges: Sequence[DocumentRange]) -> None:
    """Copy the tokens of *ranges* to the `.bin` of *files*, in order.

    Args:
        files: The new dataset.
        ranges: Documents of existing datasets.

    Raises:
        DataError: The disk is full, or a dataset has changed since it was opened.
    """
    for part in ranges:
        source = Path(f"{part.prefix}.bin")
        try:
            stream = source.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"cannot read `{source}`", why=error.strerror or str(error)) from error
        with stream, disk_errors(files.bin_path):
            size = part.tokens * part.token_bytes
            files.bin.flush()
            start = part.first_token * part.token_bytes
            if copy_bytes(stream.fileno(), files.bin.fileno(), start, size) != size:
                raise file_changed(source)


def copy_bytes(source: int, target: int, start: int, count: int) -> int:
    """Append *count* bytes of a file, from *start* on, to another; return the number of bytes.

    The kernel copies them (or shares them, if the file system can); if it cannot, this process
    reads and writes them.

    Args:
        source: File descriptor open for reading.
        target: File descriptor open for writing, at its end.
        start: Offset of the first byte in *source*.
        count: Number of bytes; fewer are copied at the end of *source*.

    Raises:
        OSError: Reading or writing failed.
    """
    done = 0
    for copy in (_copy_in_kernel, _send, _read_and_write):
        try:
            while done < count:
                copied = copy(source, target, start + done, min(count - done, _COPY_BYTES))
                if copied == 0:
                    break
                done += copied
        except OSError as error:
            if error.errno not in _NOT_POSSIBLE or copy is _read_and_write:
                raise
    return done


_NOT_POSSIBLE = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
}


def _copy_in_kernel(source: int, target: int, start: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset_src=start)


def _send(source: int, target: int, start: int, count: int) -> int:
    return os.sendfile(target, source, start, count)


def _read_and_write(source: int, target: int, start: int, count: int) -> int:
    content = os.pread(source, min(count, _CHUNK), start)
    written = 0
    while written < len(content):
        written += os.write(target, content[written:])
    return written


def _pieces(values: Integers, first: int, last: int) -> Iterator[Integers]:
    files = MappedFiles(values)
    for at in range(first, last, _CHUNK):
        with files.reading("the index"):
            piece = values[at : min(at + _CHUNK, last)].copy()
        yield piece
