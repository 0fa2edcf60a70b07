"""Unfinished dataset of one key: three plain files that can be truncated to any shard.

0.bin          tokens, as in the final `PREFIX_KEY_document.bin`
0.sizes        int32, number of tokens of each sequence
0.documents    int32, number of sequences of each document

The index is written from these at the end, so that memory does not grow with the corpus, or from
shuffled copies of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.base.durable import sync_file
from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.files import check_token_range, commit_pair, disk_errors
from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.idx_writer import write_index
from lmcore.data.prepare.encode_types import KeyTokens
from lmcore.data.prepare.shuffle import shuffle_documents

__all__ = ["DatasetCounts", "PartialDataset"]

_CHUNK = 1 << 20
_ENDINGS = ("bin", "sizes", "documents")
Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class DatasetCounts:
    """Contents of the files of a key: numbers of tokens, sequences, documents, empty documents."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    empty: int = 0


class PartialDataset:
    """Unfinished dataset of one key.

    Args:
        folder: directory of its files.
        number: first part of their names.
        prefix: path of the final dataset without suffix.
        dtype: type of a stored token.
        counts: contents to keep of existing files; the rest is truncated.

    Raises:
        DataError: the file system refuses, or a file is shorter than *counts*.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        prefix: str,
        dtype: np.dtype[np.integer],
        counts: DatasetCounts,
    ) -> None:
        self.prefix, self.dtype, self.counts = prefix, dtype, counts
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self._idx = folder / f"{number}.idx"
        self._paths = [folder / f"{number}.{ending}" for ending in _ENDINGS]
        self._finished = self._paths
        self._files: list[BinaryIO] = []
        for path, size in zip(self._paths, self._sizes_on_disk(), strict=True):
            with disk_errors(path):
                self._files.append(_opened(path, size))

    def _sizes_on_disk(self) -> tuple[int, int, int]:
        count = self.counts
        return count.tokens * self.dtype.itemsize, count.sequences * 4, count.documents * 4

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.counts.sequences

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.counts.documents

    @property
    def multimodal(self) -> bool:
        """False: no sequence has a mode."""
        return False

    def add(self, key: KeyTokens) -> None:
        """Append the documents of a batch.

        Raises:
            DataError: the disk is full, or a token or length does not fit the format.
        """
        tokens = self._fitting(key.tokens)
        lengths = key.lengths.astype("<i4", copy=False)
        per_document = key.per_document
        if per_document is None:
            per_document = np.ones(len(lengths), dtype="<i4")
        with disk_errors(self._paths[0]):
            for file, values in zip(self._files, (tokens, lengths, per_document), strict=True):
                file.write(np.ascontiguousarray(values).data)
        count = self.counts
        self.counts = DatasetCounts(
            count.tokens + len(tokens),
            count.sequences + len(lengths),
            count.documents + len(per_document),
            count.empty + key.empty,
        )

    def _fitting(self, tokens: Integers) -> Integers:
        if tokens.dtype != self.dtype:
            check_token_range(tokens, self.dtype, self.bin_path)
        return tokens.astype(self.dtype.newbyteorder("<"), copy=False)

    def sync(self) -> None:
        """Sync the files to disk."""
        with disk_errors(self._paths[0]):
            for file in self._files:
                sync_file(file)

    def abandon(self, counts: DatasetCounts) -> None:
        """Close the files and truncate them to *counts*."""
        self.close()
        self.counts = counts
        for path, size in zip(self._paths, self._sizes_on_disk(), strict=True):
            with suppress(FileNotFoundError):  # already renamed
                os.truncate(path, size)
        if self._finished is not self._paths:
            for path in self._finished:
                path.unlink(missing_ok=True)
        self._idx.unlink(missing_ok=True)

    def finish(self, format_: Format, shuffle_seed: int | None = None) -> None:
        """Write the index and sync all files; with a seed, shuffle the documents first."""
        with disk_errors(self._paths[0]):
            for file in self._files:
                file.flush()
            if shuffle_seed is not None:
                self._shuffle(shuffle_seed)
            with self._finished[0].open("rb") as tokens:
                os.fsync(tokens.fileno())
        with disk_errors(self._idx), self._idx.open("wb") as file:
            write_index(file, self, self.dtype, format_)
            sync_file(file)

    def _shuffle(self, seed: int) -> None:
        shuffled = [path.with_suffix(f".shuffled-{path.suffix[1:]}") for path in self._paths]
        self._finished = shuffled
        token_bytes = self.dtype.itemsize
        shuffle_documents(self._paths, shuffled, token_bytes=token_bytes, seed=seed)

    def checksums(self) -> DatasetChecksums:
        """Return the checksums of the finished files, before `commit`."""
        return DatasetChecksums.of_files(self._finished[0], self._idx)

    def commit(self) -> None:
        """Rename the finished files to their final names."""
        commit_pair((self._finished[0], self._idx), self.bin_path, self.idx_path)

    def close(self) -> None:
        """Close the files without removing them."""
        for file in self._files:
            try:
                file.close()
            except OSError:  # closing flushes, which fails again on a full disk
                continue

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in chunks."""
        yield from _numbers(self._finished[1])

    def document_ends(self) -> Iterator[Integers]:
        """Yield for each document the number of sequences up to its end, in chunks."""
        before = 0
        for counts in _numbers(self._finished[2]):
            ends = before + np.cumsum(counts, dtype=np.int64)
            yield ends
            before = int(ends[-1])

    def modes(self) -> Iterator[Integers]:
        """Yield nothing."""
        return iter(())


def _opened(path: Path, size: int) -> BinaryIO:
    """Open a file at its end, truncated to *size* bytes."""
    file = path.open("r+b" if size else "w+b", buffering=_CHUNK)
    found = file.seek(0, os.SEEK_END)
    if found < size:
        file.close()
        raise DataError(
            f"`{path}` has {counted(found, 'byte')}, expected at least {size:,}",
            why="the unfinished output was changed",
            hint="remove the directory and start again without `--resume`",
        )
    file.truncate(size)
    file.seek(size)
    return file


def _numbers(path: Path) -> Iterator[Integers]:
    with path.open("rb") as file:
        while content := file.read(_CHUNK * 4):
            yield np.frombuffer(content, dtype="<i4")
