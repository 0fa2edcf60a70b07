"""Writer of indexed datasets, document by document; files appear complete or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.files import IndexedFiles, check_token_range, disk_errors
from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.idx_writer import NumberSpool, dtype_code

__all__ = ["FORMATS", "IndexedDatasetWriter"]

FORMATS: dict[str, Format] = {"mmap": "mmap", "cached": "cached", "lazy": "cached"}
"""Formats by `--dataset-impl`; `cached` and `lazy` are one format with two readers."""


class IndexedDatasetWriter:
    """Writer of `PREFIX.bin` and `PREFIX.idx`; a context manager that commits on a clean exit.

    On an exception the temporary files are removed, and older files of that name stay.  For several
    datasets that must appear together call `finish` on all of them, then `commit`.  Memory does
    not grow with the number of documents.

    Args:
        prefix: Path of the files without ending; its directory is created if missing.
        dtype: Type of a stored token (see `token_dtype`).
        dataset_impl: Format, a key of `FORMATS`.

    Raises:
        DataError: The disk is full or not writable, or a token does not fit the type.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, *, dataset_impl: str = "mmap"
    ) -> None:
        _, self.dtype = dtype_code(dtype)
        self.format = FORMATS[dataset_impl]
        self.prefix = str(prefix)
        self._files = IndexedFiles(prefix)
        self.idx_path, self.bin_path = self._files.idx_path, self._files.bin_path
        self._sizes = NumberSpool(self.bin_path.parent, "i")
        self._document_ends = NumberSpool(self.bin_path.parent, "q")
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Number of documents added."""
        return len(self._document_ends)

    @property
    def sequences(self) -> int:
        """Number of sequences added."""
        return len(self._sizes)

    @property
    def multimodal(self) -> bool:
        """True if each sequence has a mode; always False."""
        return False

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish and commit, or remove the written files if the block raised."""
        if kind is None:
            try:
                self.finish()
                self.commit()
            finally:
                self.close()
        else:
            self.close()

    def add_document(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        lengths: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Append a document.

        Args:
            tokens: Token ids of the document.
            lengths: Tokens of each of its sequences; None for one sequence.

        Raises:
            DataError: The disk is full, or a token does not fit the type.
            ValueError: *tokens* are not integers, or *lengths* do not sum to their number.
        """
        values = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens, dtype=np.int64)
        if not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"tokens are integers, not {values.dtype}")
        sizes = np.asarray([values.size] if lengths is None else lengths, dtype=np.int64)
        if values.ndim != 1 or int(sizes.sum()) != values.size or (sizes < 0).any():
            raise ValueError(f"{values.size} tokens do not make sequences of {sizes.sum()}")
        check_token_range(values, self.dtype, self.bin_path)
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"`{self.bin_path}`: a sequence of {sizes.max()} tokens",
                why="the format allows at most 2147483647 tokens in a sequence",
                hint="split the document",
            )
        with disk_errors(self.idx_path):
            self._sizes.extend(sizes)
        with disk_errors(self.bin_path):
            self._files.bin.write(np.ascontiguousarray(values.astype(self.dtype, copy=False)).data)
        self.tokens += values.size
        with disk_errors(self.idx_path):
            self._document_ends.append(len(self._sizes))

    def finish(self) -> None:
        """Write the index and sync both temporary files to the disk."""
        self._files.finish(self, self.dtype, self.format)

    def checksums(self) -> DatasetChecksums:
        """Return the checksums of the finished files, before `commit`."""
        return DatasetChecksums.of_files(*self._files.finished_paths)

    def commit(self) -> None:
        """Give the finished files their names."""
        self._files.commit()

    def close(self) -> None:
        """Remove the files unless they were committed; may be called again."""
        self._files.close()
        self._sizes.close()
        self._document_ends.close()

    def sizes(self) -> Iterator[npt.NDArray[np.integer]]:
        """Yield the number of tokens of each sequence added, in pieces."""
        return self._sizes.chunks()

    def document_ends(self) -> Iterator[npt.NDArray[np.integer]]:
        """Yield the last sequence + 1 of each document, in pieces."""
        return self._document_ends.chunks()

    def modes(self) -> Iterator[npt.NDArray[np.integer]]:
        """Return an empty iterator."""
        return iter(())
