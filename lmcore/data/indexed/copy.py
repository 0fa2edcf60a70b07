"""Runs of documents of datasets that exist, put together into new ones: what merge and split share.

Tokens are copied by the kernel, indices in pieces, so that memory does not grow with the data; and
files are opened one after another, so that thousands can be put together.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles, disk_errors, file_changed
from lmcore.data.indexed.idx_reader import Index, read_index
from lmcore.errors import DataError

__all__ = ["DocumentRange", "DocumentRanges", "copy_bytes", "write_ranges"]

_CHUNK = 1 << 20
_COPY_BYTES = 1 << 26  # a signal waits no longer than such a piece takes

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a dataset.

    Attributes:
        prefix: The dataset.
        first: Its first document that is taken.
        last: The one after the last.
        first_sequence, last_sequence: Likewise, of sequences.
        first_token, last_token: Likewise, of tokens.
        token_bytes: Bytes of a token.
        multimodal: Whether its sequences have modes.
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
        """Return documents *first* to *last* of an open dataset; None for its end."""
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
            DataError: It is not the one that it was.
        """
        index = read_index(f"{self.prefix}.idx", verify=False)
        same = len(index.sizes) >= self.last_sequence and index.document_count >= self.last
        if not same or int(index.document_indices[self.last]) != self.last_sequence:
            raise file_changed(index.path)
        return index


class DocumentRanges:
    """Several ranges one after another, as the content of a new index."""

    def __init__(self, ranges: Sequence[DocumentRange]) -> None:
        self.ranges = tuple(ranges)
        self.sequences = sum(one.sequences for one in self.ranges)
        self.documents = sum(one.documents for one in self.ranges)
        self.tokens = sum(one.tokens for one in self.ranges)
        with_sequences = [one for one in self.ranges if one.sequences]
        self.multimodal = bool(with_sequences) and all(one.multimodal for one in with_sequences)

    def sizes(self) -> Iterator[Integers]:
        """Yield the tokens of each sequence, in pieces."""
        for one in self.ranges:
            yield from _pieces(one.open_index().sizes, one.first_sequence, one.last_sequence)

    def document_ends(self) -> Iterator[Integers]:
        """Yield for each document the number of sequences in it and before it, in pieces."""
        before = 0
        for one in self.ranges:
            bounds = one.open_index().document_indices
            for piece in _pieces(bounds, one.first + 1, one.last + 1):
                yield piece - one.first_sequence + before
            before += one.sequences

    def modes(self) -> Iterator[Integers]:
        """Yield the mode of each sequence, in pieces."""
        for one in self.ranges:
            modes = one.open_index().modes
            if modes is not None:
                yield from _pieces(modes, one.first_sequence, one.last_sequence)


def write_ranges(files: IndexedFiles, ranges: Sequence[DocumentRange]) -> None:
    """Copy the tokens of *ranges* to the `.bin` of *files*, in order.

    Raises:
        DataError: The disk is full, or a source is not what it was when it was opened.
    """
    for one in ranges:
        source = Path(f"{one.prefix}.bin")
        try:
            stream = source.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"cannot read `{source}`", why=error.strerror or str(error)) from error
        with stream, disk_errors(files.bin_path):
            size = one.tokens * one.token_bytes
            files.bin.flush()
            start = one.first_token * one.token_bytes
            if copy_bytes(stream.fileno(), files.bin.fileno(), start, size) != size:
                raise file_changed(source)


def copy_bytes(source: int, target: int, start: int, count: int) -> int:
    """Append *count* bytes of a file, from *start* on, to another; return how many there were.

    The kernel copies, without the bytes passing through this process, or shares them where the
    file system can; where it will not, they are read and written.

    Args:
        source: A descriptor, open for reading.
        target: One open for writing, at its end.
        start: First byte wanted.
        count: How many.

    Raises:
        OSError: The disk refuses.
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
    for at in range(first, last, _CHUNK):
        yield values[at : min(at + _CHUNK, last)]
