"""Reader of the `.idx` of an indexed dataset, in both of Megatron's formats.

`mmap` is the current format; `cached` and `lazy` are two names of the older one, which fairseq
has in a shorter form without documents.  The first bytes of a file identify its format.
`IndexedDataset` adds the tokens, `idx_writer` writes the formats, and
`docs/reference/file-formats.md` describes them.  Counts in a header are checked against
the size of the file before any memory is allocated.
"""

from __future__ import annotations

import errno
import resource
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = [
    "CACHED_HEADER",
    "CACHED_MAGIC",
    "HEADER",
    "MAGIC",
    "TOKEN_DTYPES",
    "VERSION",
    "Format",
    "Index",
    "map_file",
    "read_index",
]

Format = Literal["mmap", "cached"]

VERSION = 1
MAGIC = b"MMIDIDX\x00\x00"
# After the magic: version, dtype code, sequences, entries of the document index.
HEADER = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + HEADER.size
CACHED_MAGIC = b"TNTIDX\x00\x00"
# After the magic: version, dtype code, bytes of a token, items, dimensions, document entries.
CACHED_HEADER = struct.Struct("<QQQQQQ")
_CACHED_BYTES = len(CACHED_MAGIC) + CACHED_HEADER.size
_FAIRSEQ_BYTES = _CACHED_BYTES - 8  # without document entries
TOKEN_DTYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_CHUNK = 1 << 20
_LARGEST_SIZE = int(np.iinfo(np.int32).max)
SHORT_FILE = "the file is cut short; copy or prepare it again"
_DAMAGED = "the file is damaged; prepare the data again, or try `lmcore data repair`"


@dataclass(frozen=True)
class Index:
    """Content of an `.idx`; the arrays are read-only views of the file.

    Attributes:
        path: Path of the file.
        format: `mmap`, or `cached` (also called `lazy`).
        dtype: Type of a stored token.
        sizes: int32 (int64 in `cached`) [sequences], tokens of each sequence, at most 2**31 - 1.
        starts: int64 [sequences], start of each sequence in the `.bin`, in units of `start_bytes`.
        start_bytes: Bytes of that unit: 1 for `mmap`, the size of a token for `cached`.
        document_indices: int64 [documents + 1], first sequence of each document, and the number of
            sequences.
        modes: int8 [sequences], mode of each sequence; None if the data is not multimodal.
        tokens: Number of tokens.
    """

    path: Path
    format: Format
    dtype: np.dtype[np.integer]
    sizes: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]
    start_bytes: int
    document_indices: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None
    tokens: int

    @property
    def document_count(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def bin_bytes(self) -> int:
        """Size that the `.bin` must have, in bytes."""
        return self.tokens * self.dtype.itemsize

    @property
    def unit(self) -> int:
        """Difference of `starts` per token."""
        return self.dtype.itemsize // self.start_bytes

    def start_of(self, sequence: int) -> int:
        """Return the number of tokens before a sequence; all tokens for the last sequence + 1."""
        if sequence == len(self.sizes):
            return self.tokens
        return int(self.starts[sequence]) // self.unit


def _misnamed(path: Path) -> str | None:
    """Return a hint if the index has the ending of a copied script, `.bin.idx`; else None."""
    prefix = path.name.removesuffix(".idx")
    if path.suffix != ".idx" or not path.with_name(f"{prefix}.bin.idx").is_file():
        return None
    whole = path.with_name(prefix)
    return f"`{prefix}.bin.idx` is there: `lmcore data repair {whole}` gives it its name"


def read_index(path: str | Path, *, verify: bool = True) -> Index:
    """Memory-map an `.idx` of either format; its `.bin` is not opened.

    Args:
        path: Path of the file.
        verify: True to compare every start with the sizes (reads the whole file once).  The size of
            the file and the ends of its arrays are always checked.

    Raises:
        DataError: The file is truncated, inconsistent or of another format.
    """
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as file:  # noqa: PTH123 - a descriptor
            head = file.read(max(_HEADER_BYTES, _CACHED_BYTES))
        found = path.stat().st_size
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"cannot read `{path}`", why=why, hint=_misnamed(path)) from error
    if head.startswith(CACHED_MAGIC):
        index = _read_cached(path, head, found, verify=verify)
    elif head.startswith(MAGIC):
        index = _read_mmap(path, head[:_HEADER_BYTES], found)
    else:
        raise DataError(
            f"`{path}` is not an index of an indexed dataset",
            why=f"it does not begin with `{MAGIC[:7].decode()}`"
            + ("" if head else ": it is empty"),
            hint="give the prefix of a dataset; if its .bin file is whole, `lmcore data repair` "
            "rebuilds the index",
        )
    if index.tokens < 0:
        raise DataError(
            f"`{path}` counts {index.tokens:,} tokens",
            why="the start of its last sequence is negative",
            hint=_DAMAGED,
        )
    with MappedFiles(index.starts).reading("the index"):
        if verify:
            _check_starts(index)
        _check_documents(index, verify=verify)
    return index


def map_file(path: Path, dtype: np.dtype[np.integer]) -> npt.NDArray[np.integer]:
    """Return a file as a read-only array [elements].

    Each map holds a file descriptor, and data file lists name thousands of datasets: if the
    process reaches its limit of open files, the limit is raised to the system's maximum.

    Args:
        path: Path of the file.
        dtype: Type of its elements.

    Raises:
        DataError: Too many files are open, or the file cannot be read.
    """
    try:
        try:
            mapped = np.memmap(path, dtype=dtype, mode="r")
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            mapped = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(
            f"cannot open `{path}`",
            why=error.strerror or str(error),
            hint="allow more open files with `ulimit -n`, or merge datasets with "
            "`lmcore data merge`"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
            else None,
        ) from error
    # A plain array on the map: slicing `np.memmap` itself is several times slower.
    return np.asarray(mapped)


def _read_mmap(path: Path, head: bytes, found: int) -> Index:
    if len(head) < _HEADER_BYTES:
        raise _short_header(path, _HEADER_BYTES, found)
    version, code, sequences, entries = HEADER.unpack(head[len(MAGIC) :])
    _check_version(path, version)
    dtype = _token_type(path, code)
    expected = _HEADER_BYTES + 12 * sequences + 8 * entries
    # A multimodal index ends with one more byte per sequence, its mode.
    if found not in (expected, expected + sequences):
        raise _other_size(path, sequences, entries, expected, found)
    if entries < 1:
        raise DataError(f"`{path}` has no document index", hint="prepare the data again")
    content = map_file(path, np.dtype("u1"))
    at = _HEADER_BYTES
    sizes: npt.NDArray[np.int32] = content[at : (at := at + 4 * sequences)].view("<i4")
    starts: npt.NDArray[np.int64] = content[at : (at := at + 8 * sequences)].view("<i8")
    documents: npt.NDArray[np.int64] = content[at : (at := at + 8 * entries)].view("<i8")
    multimodal = sequences > 0 and found > expected
    tokens = 0
    if sequences:
        _check_size(path, sequences - 1, int(sizes[-1]))
        tokens = int(starts[-1]) // dtype.itemsize + int(sizes[-1])
    modes: npt.NDArray[np.int8] | None = content[at:].view("i1") if multimodal else None
    return Index(path, "mmap", dtype, sizes, starts, 1, documents, modes, tokens)


def _read_cached(path: Path, head: bytes, found: int, *, verify: bool) -> Index:
    if len(head) < _FAIRSEQ_BYTES:
        raise _short_header(path, _FAIRSEQ_BYTES, found)
    padded = head.ljust(_CACHED_BYTES, b"\0")[len(CACHED_MAGIC) :]
    version, code, width, items, dimensions, entries = CACHED_HEADER.unpack(padded)
    _check_version(path, version)
    dtype = _token_type(path, code)
    longs = 2 * (items + 1) + dimensions
    expected = _CACHED_BYTES + 8 * (longs + entries)
    # fairseq writes neither the number of documents nor their index.
    plain = found == _FAIRSEQ_BYTES + 8 * longs and found != expected
    if not plain and found != expected:
        raise _other_size(path, items, entries, expected, found)
    if width != dtype.itemsize:
        raise DataError(
            f"`{path}` gives {counted(width, 'byte')} as the size of a token of type {dtype}",
            hint=_DAMAGED,
        )
    if dimensions != items:
        raise DataError(
            f"`{path}` holds tensors, not sequences of tokens",
            why=f"{counted(items, 'item')} and {counted(dimensions, 'dimension')} in all; "
            "a sequence has one dimension",
        )
    if not plain and entries < 1:
        raise DataError(f"`{path}` has no document index", hint="prepare the data again")
    content = map_file(path, np.dtype("u1"))
    numbers: npt.NDArray[np.int64] = content[_FAIRSEQ_BYTES if plain else _CACHED_BYTES :].view(
        "<i8"
    )
    dims, starts = numbers[: items + 1], numbers[items + 1 : 2 * (items + 1)]
    _check_dimensions(path, dims, verify=verify)
    sizes = numbers[2 * (items + 1) : longs]
    if sizes.size:
        for extreme in (int(sizes.argmin()), int(sizes.argmax())):
            _check_size(path, extreme, int(sizes[extreme]))
    documents = np.arange(items + 1, dtype=np.int64) if plain else numbers[longs:]
    tokens = int(starts[-1])
    before_end = int(starts[-2]) + int(sizes[-1]) if items else 0
    if tokens != before_end:
        raise _wrong_start(path, items, tokens * width, before_end * width)
    return Index(path, "cached", dtype, sizes, starts[:-1], dtype.itemsize, documents, None, tokens)


def _check_dimensions(path: Path, dims: npt.NDArray[np.int64], *, verify: bool) -> None:
    sound = (int(dims[0]), int(dims[-1])) == (0, len(dims) - 1)
    for at in range(0, len(dims) if verify else 0, _CHUNK):
        piece = dims[at : at + _CHUNK]
        sound = sound and bool((piece == np.arange(at, at + len(piece))).all())
    if not sound:
        raise DataError(f"`{path}`: its sequences do not have one dimension each", hint=_DAMAGED)


def _check_size(path: Path, sequence: int, size: int) -> None:
    if not 0 <= size <= _LARGEST_SIZE:
        raise DataError(f"`{path}`: sequence {sequence} has {size} tokens", hint=_DAMAGED)


def _check_starts(index: Index) -> None:
    """Compare each start with the sizes before it."""
    unit, start = index.unit, 0
    for at in range(0, len(index.sizes), _CHUNK):
        sizes = index.sizes[at : at + _CHUNK].astype(np.int64)
        if sizes.min() < 0:
            bad = int(np.flatnonzero(sizes < 0)[0])
            _check_size(index.path, at + bad, int(sizes[bad]))
        expected = (start + np.cumsum(sizes) - sizes) * unit
        wrong = np.flatnonzero(index.starts[at : at + _CHUNK] != expected)
        if wrong.size:
            i = at + int(wrong[0])
            raise _wrong_start(
                index.path,
                i,
                int(index.starts[i]) * index.start_bytes,
                int(expected[wrong[0]]) * index.start_bytes,
            )
        start += int(sizes.sum())


def _check_documents(index: Index, *, verify: bool) -> None:
    bounds = index.document_indices
    ends = (int(bounds[0]), int(bounds[-1]))
    rising = all(
        bool((np.diff(bounds[at : at + _CHUNK + 1]) >= 0).all())
        for at in range(0, len(bounds) if verify else 0, _CHUNK)
    )
    if ends != (0, len(index.sizes)) or not rising:
        raise DataError(
            f"`{index.path}`: the document index is not a partition of the sequences",
            why=f"it must rise from 0 to {len(index.sizes)}; it goes from {ends[0]} to {ends[1]}"
            + ("" if rising else " and falls in between"),
            hint="the index is damaged; prepare the data again, or try `lmcore data repair`",
        )


def _check_version(path: Path, version: int) -> None:
    if version != VERSION:
        why = f"only version {VERSION} is supported"
        raise DataError(f"`{path}` has version {version}", why=why)


def _token_type(path: Path, code: int) -> np.dtype[np.integer]:
    if code in _FLOAT_CODES:
        raise DataError(f"`{path}` holds {_FLOAT_CODES[code]} values, not tokens")
    if code not in TOKEN_DTYPES:
        raise DataError(
            f"`{path}` has the dtype code {code}",
            why=f"known codes of token types: {', '.join(map(str, TOKEN_DTYPES))}",
            hint=_DAMAGED,
        )
    return TOKEN_DTYPES[code]


def _short_header(path: Path, wanted: int, found: int) -> DataError:
    return DataError(
        f"`{path}` is cut short",
        why=f"expected a header of {wanted} bytes, found {found}",
        hint=SHORT_FILE,
    )


def _other_size(path: Path, sequences: int, entries: int, expected: int, found: int) -> DataError:
    noun = counted(entries, "document entry", "document entries")
    return DataError(
        f"the size of `{path}` does not match its header",
        why=f"{counted(sequences, 'sequence')} and {noun}: expected {counted(expected, 'byte')}, "
        f"found {found:,}",
        hint=SHORT_FILE if found < expected else _DAMAGED,
    )


def _wrong_start(path: Path, sequence: int, found: int, expected: int) -> DataError:
    return DataError(
        f"`{path}`: sequence {sequence} starts at byte {found}",
        why=f"the sizes before it sum to byte {expected}",
        hint="the index is damaged, or another tool wrote it wrongly; prepare the data again, or "
        "try `lmcore data repair`",
    )
