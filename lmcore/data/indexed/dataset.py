"""Indexed datasets: a `.bin` of tokens and an `.idx` of sequences, both memory-mapped.

Both of Megatron's formats are read byte for byte; `idx_reader` reads the `.idx`, `writer` writes
datasets.  Files are never read as a whole: unlike Megatron's `lazy` and `cached` readers, this one
leaves caching to the operating system.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.derived.data_source import without_ending
from lmcore.data.indexed.idx_reader import SHORT_FILE, TOKEN_DTYPES, map_file, read_index
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = ["IndexedDataset", "token_dtype"]

_UINT16_LIMIT = 65_500

Tokens = npt.NDArray[np.integer]


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Return the type of stored tokens: uint16 for fewer than 65,500 ids, else int32.

    Source:
        Megatron-LM, `DType.optimal_dtype` in `megatron/core/datasets/indexed_dataset.py`.
    """
    return TOKEN_DTYPES[8] if vocab_size < _UINT16_LIMIT else TOKEN_DTYPES[4]


class IndexedDataset:
    """Sequences of tokens in `PREFIX.bin`, found through `PREFIX.idx`.

    Args:
        prefix: Path of the files without `.bin` or `.idx`.
        verify: True to compare every pointer with the sizes (reads the whole `.idx`).  The sizes of
            the files and the ends of the arrays are always checked.
        verify_indices: See the attribute.

    Attributes:
        index: Content of the `.idx`.
        dtype: Type of a stored token.
        sizes: int32 [sequences], tokens of each sequence.
        document_indices: int64 [documents + 1], first sequence of each document, and the number of
            sequences.
        modes: int8 [sequences], mode of each sequence of multimodal data; else None.
        tokens: Number of tokens.
        verify_indices: True if every block of the cached indices of the dataset is to be verified
            when they are opened.

    Raises:
        DataError: A file is missing, truncated or inconsistent.
    """

    def __init__(
        self, prefix: str | Path, *, verify: bool = True, verify_indices: bool = False
    ) -> None:
        self.prefix, self.verify_indices = str(prefix), verify_indices
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(f"no such file: `{path}`", hint=_missing_hint(self.prefix))
        self.index = read_index(self.idx_path, verify=verify)
        self.dtype = self.index.dtype
        self.sizes: npt.NDArray[np.int32] = self.index.sizes.astype(np.int32, copy=False)
        self.document_indices, self.modes = self.index.document_indices, self.index.modes
        self.tokens = self.index.tokens
        self._starts = self.index.starts
        self._unit = self.index.unit
        self._check_bin()
        self._tokens: Tokens = (
            map_file(self.bin_path, self.dtype) if self.tokens else np.empty(0, dtype=self.dtype)
        )
        self._files = MappedFiles(self._tokens, self.index.sizes)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    @property
    def document_count(self) -> int:
        """Number of documents."""
        return self.index.document_count

    def sequence_range(self, documents: tuple[int, int]) -> tuple[int, int]:
        """Return the first sequence of a range of documents, and the one after the last."""
        first, last = documents
        if not 0 <= first <= last <= self.document_count:
            raise ValueError(f"documents {documents} of {self.document_count}")
        return int(self.document_indices[first]), int(self.document_indices[last])

    def tokens_in(self, documents: tuple[int, int]) -> int:
        """Return the number of tokens in a range of documents."""
        first, last = self.sequence_range(documents)
        return self.index.start_of(last) - self.index.start_of(first)

    @property
    def stored(self) -> Tokens:
        """All tokens of the `.bin` in order, a read-only view of the file."""
        return self._tokens

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens of sequence *i* as a read-only view of the file.

        Args:
            i: Number of the sequence.
            offset: First token of the sequence to return.
            length: Number of tokens; None for all that follow.

        Raises:
            IndexError: The sequence does not exist, or ends before the last token.
        """
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"sequence {i} of {len(self.sizes)}")
        size = int(self.sizes[i])
        wanted = size - offset if length is None else length
        if offset < 0 or wanted < 0 or offset + wanted > size:
            raise IndexError(f"tokens {offset} to {offset + wanted} of a sequence of {size}")
        start = int(self._starts[i]) // self._unit + offset
        return self._tokens[start : start + wanted]

    def document(self, i: int) -> Tokens:
        """Return all tokens of document *i* as a read-only view of the file.

        Raises:
            IndexError: The document does not exist.
        """
        if not 0 <= i < self.document_count:
            raise IndexError(f"document {i} of {self.document_count}")
        first, last = self.sequence_range((i, i + 1))
        return self._tokens[self.index.start_of(first) : self.index.start_of(last)]

    def reading(self, part: str) -> AbstractContextManager[None]:
        """Return a context manager for a block that reads the mapped files.

        Its end raises a `DataError` if a file was cut short: then what the block read is not valid.

        Args:
            part: Name of what is to be read, for the message.
        """
        return self._files.reading(part)

    def _check_bin(self) -> None:
        found, expected = self.bin_path.stat().st_size, self.index.bin_bytes
        if found != expected:
            raise DataError(
                f"`{self.bin_path}` does not match its index",
                why=f"`{self.idx_path}` counts {counted(self.tokens, 'token')} of "
                f"{counted(self.dtype.itemsize, 'byte')}: expected {counted(expected, 'byte')}, "
                f"found {found:,}",
                hint=SHORT_FILE if found < expected else _LONG,
            )


_LONG = (
    "tools that append an end-of-document token without counting it write such files; "
    "prepare the data again, or try `lmcore data repair`"
)


def _missing_hint(prefix: str) -> str | None:
    bare = without_ending(prefix)
    if bare != prefix and Path(f"{bare}.idx").is_file():
        return f"give the prefix without its ending: `{bare}`"
    if Path(f"{prefix}.bin").is_file():
        return f"`lmcore data repair {prefix}` finds an index of another name, or builds one"
    if Path(f"{prefix}.idx").is_file():
        return "copy the `.bin` with the tokens beside its `.idx`"
    if Path(f"{prefix}.idx").is_symlink():
        return f"`{prefix}.idx` is a symbolic link to nothing: check its target"
    directory, name = Path(prefix).parent, Path(prefix).name
    if directory.is_dir():
        stems = sorted(path.stem for path in directory.glob("*.idx") if path.stem.startswith(name))
        if stems:
            return f"did you mean `{directory / stems[0]}`?"
    return missing_path_hint(
        prefix,
        "a dataset is two files, PREFIX.bin and PREFIX.idx; `lmcore data prepare` writes them",
        ending=".idx",
    )
