"""Unfinished dataset of one key: three plain files that can be truncated to any shard.

0.bin          tokens, as in the final `PREFIX_KEY_document.bin`
0.sizes        int32, number of tokens of each sequence
0.documents    int32, number of sequences of each document

The index is written from these at the end, so that memory does not grow with the corpus, or from
shuffled copies of them.

Shuffling of an unfinished dataset: its documents in a random order, in bounded memory.

Every document gets a random key of 64 bits, from the seed and its place in the input; the documents
in the order of their keys are the result, which therefore depends on nothing else.  A dataset of
several times the memory is written in as many passes: each collects the documents whose keys are
in one range, and skips the tokens of the others.  Datasets of several keys with the same number of
documents get the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.base.durable import sync_file
from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.files import check_token_range, commit_pair, disk_errors, file_changed
from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.idx_writer import write_index
from lmcore.data.prepare.encode_types import KeyTokens

__all__ = [
    "DatasetCounts",
    "PartialDataset",
    "shuffle_documents",
]

_HELD_BYTES = 1 << 28
_DOCUMENT_BYTES = 200
"""Memory of a held document besides its tokens and lengths."""
_CHUNK = 1 << 16
_KEYS = 1 << 64


@dataclass(frozen=True)
class _Documents:
    """Consecutive documents: arrays of the files, and the byte offsets [documents + 1]."""

    per_document: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    first_lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]


def shuffle_documents(
    source: Sequence[Path],
    target: Sequence[Path],
    *,
    token_bytes: int,
    seed: int,
    held_bytes: int = _HELD_BYTES,
) -> None:
    """Write the documents of *source* to *target* in the order of their random keys.

    Args:
        source: files of a `PartialDataset`: tokens, lengths of sequences, sequences of documents.
        target: the same of the result.
        token_bytes: size of a stored token, in bytes.
        seed: seed of the keys.
        held_bytes: documents in memory at a time, in bytes; one document may be larger.
    """
    documents = source[2].stat().st_size // 4
    size = sum(path.stat().st_size for path in source) + _DOCUMENT_BYTES * documents
    passes = max(1, -(-size // held_bytes))
    bounds = [_KEYS * i // passes for i in range(passes + 1)]
    files = [path.open("wb") for path in target]
    tokens = os.open(source[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        for low, high in pairwise(bounds):
            chosen = _chosen(source, tokens, token_bytes, seed, (low, high - 1))
            for _, _, pieces in sorted(chosen):  # without a name, so that it is freed in time
                for file, piece in zip(files, pieces, strict=True):
                    file.write(piece)
    finally:
        os.close(tokens)
        for file in files:
            file.close()


def _chosen(
    source: Sequence[Path], tokens: int, token_bytes: int, seed: int, keys: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[bytes, bytes, bytes]]]:
    """Yield key, number and content of the documents whose key is in a range, ends included."""
    before = 0
    for chunk in _chunks(source, token_bytes, seed):
        wanted = (chunk.keys >= np.uint64(keys[0])) & (chunk.keys <= np.uint64(keys[1]))
        for i in np.flatnonzero(wanted).tolist():
            start, end = int(chunk.offsets[i]), int(chunk.offsets[i + 1])
            lengths = chunk.lengths[chunk.first_lengths[i] : chunk.first_lengths[i + 1]]
            count = chunk.per_document[i : i + 1]
            content = (_read(source[0], tokens, start, end), lengths.tobytes(), count.tobytes())
            yield int(chunk.keys[i]), before + i, content
        before += len(chunk.keys)


def _chunks(source: Sequence[Path], token_bytes: int, seed: int) -> Iterator[_Documents]:
    numbers = np.random.Philox(seed)
    at = 0
    with source[1].open("rb") as lengths_file, source[2].open("rb") as counts_file:
        while counts := counts_file.read(4 * _CHUNK):
            per_document = np.frombuffer(counts, "<i4")
            firsts = np.concatenate(([0], np.cumsum(per_document, dtype=np.int64)))
            lengths = np.frombuffer(lengths_file.read(4 * int(firsts[-1])), "<i4")
            ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[firsts]
            offsets = at + ends * token_bytes
            keys = np.asarray(numbers.random_raw(len(per_document)), dtype=np.uint64)
            yield _Documents(per_document, lengths, firsts, offsets, keys)
            at = int(offsets[-1])


def _read(path: Path, file: int, start: int, end: int) -> bytes:
    """Return the bytes from *start* to *end* of an open file; a call reads 2 GiB at most."""
    pieces = []
    while start < end:
        piece = os.pread(file, end - start, start)
        if not piece:
            raise file_changed(path)
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


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
