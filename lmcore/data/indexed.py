"""Indexed datasets: a `.bin` of tokens and an `.idx` that finds sequences in it, mapped to memory.

Reads Megatron's mmap format byte for byte; `indexed_writer` writes it, `docs/reference/
file-formats.md` shows it.  Everything is checked against the files' sizes before it is used: a
header count is never a reason to allocate.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.errors import DataError

__all__ = ["HEADER", "MAGIC", "TOKEN_DTYPES", "IndexedDataset", "token_dtype"]

MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
# after the magic: version, dtype code, sequences, entries of the document index
HEADER = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + HEADER.size
TOKEN_DTYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_CHUNK = 1 << 22
_UINT16_LIMIT = 65_500

Tokens = npt.NDArray[np.integer]


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Return uint16 for vocabularies under 65,500 ids, int32 above; Megatron's rule."""
    return TOKEN_DTYPES[8] if vocab_size < _UINT16_LIMIT else TOKEN_DTYPES[4]


class IndexedDataset:
    """Sequences of tokens in `PREFIX.bin`, found through `PREFIX.idx`.

    Args:
        prefix: The files' path without `.bin` or `.idx`.
        verify: Compare every pointer with the sizes (reads the whole `.idx`); the files' sizes
            and the ends of the arrays are always checked.

    Attributes:
        dtype: Type of a stored token.
        sizes: Tokens of each sequence, int32.
        document_indices: The first sequence of each document, and the number of sequences.

    Raises:
        DataError: Missing, truncated or inconsistent files; says what was expected and found.
    """

    def __init__(self, prefix: str | Path, *, verify: bool = True) -> None:
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        _require_files(self.prefix, self.idx_path, self.bin_path)
        self.dtype, sequences, entries = _read_header(self.idx_path)
        index = _mapped(self.idx_path, np.dtype("u1"))
        at = _HEADER_BYTES
        self.sizes: npt.NDArray[np.int32] = index[at : (at := at + 4 * sequences)].view("<i4")
        self._pointers: npt.NDArray[np.int64] = index[at : (at := at + 8 * sequences)].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = index[at : at + 8 * entries].view("<i8")
        self.tokens = self._count_tokens(verify=verify)
        self._check_documents(verify=verify)
        self._tokens: Tokens = (
            _mapped(self.bin_path, self.dtype) if self.tokens else np.empty(0, dtype=self.dtype)
        )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    @property
    def document_count(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens of sequence *i* as a read-only view into the file.

        Args:
            i: Which sequence, from 0.
            offset: First token wanted.
            length: How many; None for all that follow.

        Raises:
            IndexError: No such sequence, or tokens beyond its end.
        """
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"sequence {i} of {len(self.sizes)}")
        size = int(self.sizes[i])
        wanted = size - offset if length is None else length
        if offset < 0 or wanted < 0 or offset + wanted > size:
            raise IndexError(f"tokens {offset} to {offset + wanted} of a sequence of {size}")
        start = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[start : start + wanted]

    def _count_tokens(self, *, verify: bool) -> int:
        """Return the number of tokens, after comparing sizes, pointers and the `.bin`."""
        width, start = self.dtype.itemsize, 0
        for at in range(0, len(self.sizes), _CHUNK):
            sizes = self.sizes[at : at + _CHUNK].astype(np.int64)
            if sizes.min() < 0:
                bad = at + int(np.flatnonzero(sizes < 0)[0])
                raise DataError(f"`{self.idx_path}`: sequence {bad} has {self.sizes[bad]} tokens")
            if verify:
                expected = (start + np.cumsum(sizes) - sizes) * width
                wrong = np.flatnonzero(self._pointers[at : at + _CHUNK] != expected)
                if wrong.size:
                    self._refuse_pointer(at + int(wrong[0]), int(expected[wrong[0]]))
            start += int(sizes.sum())
        if not verify and start:
            last = int(self._pointers[-1])
            if last != (start - int(self.sizes[-1])) * width:
                self._refuse_pointer(len(self.sizes) - 1, (start - int(self.sizes[-1])) * width)
        found = self.bin_path.stat().st_size
        if found != start * width:
            raise DataError(
                f"`{self.bin_path}` does not fit its index",
                why=f"`{self.idx_path}` counts {start} tokens of {width} bytes: expected "
                f"{start * width} bytes, found {found}",
                hint=_SHORT if found < start * width else _LONG,
            )
        return start

    def _refuse_pointer(self, i: int, expected: int) -> None:
        raise DataError(
            f"`{self.idx_path}`: sequence {i} starts at byte {self._pointers[i]}",
            why=f"the sizes before it sum to byte {expected}",
            hint="the index is damaged, or another tool wrote it wrongly; prepare the data anew",
        )

    def _check_documents(self, *, verify: bool) -> None:
        bounds = self.document_indices
        ends = (int(bounds[0]), int(bounds[-1]))
        rising = all(
            bool((np.diff(bounds[at : at + _CHUNK + 1]) >= 0).all())
            for at in range(0, len(bounds) if verify else 0, _CHUNK)
        )
        if ends != (0, len(self.sizes)) or not rising:
            raise DataError(
                f"`{self.idx_path}`: the document index is not a partition of the sequences",
                why=f"it must rise from 0 to {len(self.sizes)}; it goes from {ends[0]} to {ends[1]}"
                + ("" if rising else " and falls in between"),
                hint="the index is damaged; prepare the data anew",
            )


_SHORT = "the file is cut short; copy or prepare it again"
_LONG = (
    "a tool that appends an end-of-document token without counting it writes such files; "
    "prepare the data anew"
)


def _mapped(path: Path, dtype: np.dtype[np.integer]) -> npt.NDArray[np.integer]:
    # A plain array on the map: slicing `np.memmap` itself costs several times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _require_files(prefix: str, idx_path: Path, bin_path: Path) -> None:
    for path in (idx_path, bin_path):
        if path.is_file():
            continue
        raise DataError(f"no such file: `{path}`", hint=_missing_hint(prefix))


def _missing_hint(prefix: str) -> str:
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    if bare != prefix and Path(f"{bare}.idx").is_file():
        return f"give the prefix without its ending: `{bare}`"
    directory, name = Path(prefix).parent, Path(prefix).name
    if directory.is_dir():
        near = sorted(p.stem for p in directory.iterdir() if p.suffix == ".idx")
        close = [stem for stem in near if stem.startswith(name)]
        if close:
            return f"did you mean `{directory / close[0]}`?"
    return "a dataset is two files, PREFIX.bin and PREFIX.idx; `lmcore data prepare` writes them"


def _read_header(path: Path) -> tuple[np.dtype[np.integer], int, int]:
    """Return dtype, sequences and document-index entries, after comparing them with the size."""
    found = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if head.startswith(_OLD_MAGIC):
        raise DataError(
            f"`{path}` is in the `cached`/`lazy` format", hint="prepare the data anew as `mmap`"
        )
    if not head.startswith(MAGIC):
        raise DataError(
            f"`{path}` is not an index of an indexed dataset",
            why=f"expected it to begin with {MAGIC!r}, found {head[: len(MAGIC)]!r}",
        )
    if len(head) < _HEADER_BYTES:
        raise DataError(
            f"`{path}` is cut short",
            why=f"expected a header of {_HEADER_BYTES} bytes, found {found}",
            hint=_SHORT,
        )
    version, code, sequences, entries = HEADER.unpack(head[len(MAGIC) :])
    if version != VERSION:
        raise DataError(f"`{path}` has version {version}", why=f"only version {VERSION} is known")
    dtype = _token_type(path, code)
    expected = _HEADER_BYTES + 12 * sequences + 8 * entries
    # A multimodal index ends with one more byte per sequence, its mode.
    if found not in (expected, expected + sequences):
        raise DataError(
            f"`{path}` does not have the size that its header says",
            why=f"{sequences} sequences and {entries} document entries: expected {expected} "
            f"bytes, found {found}",
            hint=_SHORT if found < expected else "the file is damaged; prepare the data anew",
        )
    if entries < 1:
        raise DataError(f"`{path}` has no document index", hint="prepare the data anew")
    return dtype, sequences, entries


def _token_type(path: Path, code: int) -> np.dtype[np.integer]:
    if code in _FLOAT_CODES:
        raise DataError(f"`{path}` holds {_FLOAT_CODES[code]} values, not tokens")
    if code not in TOKEN_DTYPES:
        raise DataError(
            f"`{path}` has the dtype code {code}",
            why=f"known codes of token types: {', '.join(map(str, TOKEN_DTYPES))}",
            hint="the file is damaged; prepare the data anew",
        )
    return TOKEN_DTYPES[code]
