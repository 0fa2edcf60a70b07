"""Index rebuilt from the tokens alone, if an end-of-document token ends each document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.idx_writer import NumberSpool

__all__ = ["RebuiltIndex"]

_PIECE_TOKENS = 1 << 22
_LARGEST_SIZE = int(np.iinfo(np.int32).max)

Integers = npt.NDArray[np.integer]


class RebuiltIndex:
    """Content of an index with one sequence per document, each up to an end-of-document token.

    Args:
        bin_path: File of the tokens.
        dtype: Type of a stored token.
        eod: Id of the end-of-document token.
        directory: Directory of a temporary file.

    Attributes:
        unended: Number of tokens after the last end-of-document token; they are a document, too.

    Raises:
        DataError: The size of the file is not a multiple of the token's, or *eod* does not occur.
    """

    multimodal = False

    def __init__(
        self, bin_path: Path, dtype: np.dtype[np.integer], eod: int, directory: Path
    ) -> None:
        self._sizes = NumberSpool(directory, "i")
        self.unended = 0
        self._read(bin_path, dtype, eod)
        self.sequences = self.documents = len(self._sizes)

    def close(self) -> None:
        """Remove the temporary file; may be called again."""
        self._sizes.close()

    def sizes(self) -> Iterator[Integers]:
        """Yield the number of tokens of each sequence, in pieces."""
        return self._sizes.chunks()

    def document_ends(self) -> Iterator[Integers]:
        """Yield the last sequence + 1 of each document, in pieces."""
        for at in range(0, self.documents, _PIECE_TOKENS):
            yield np.arange(at, min(at + _PIECE_TOKENS, self.documents)) + 1

    def modes(self) -> Iterator[Integers]:
        """Return an empty iterator."""
        return iter(())

    def _read(self, bin_path: Path, dtype: np.dtype[np.integer], eod: int) -> None:
        size = bin_path.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"`{bin_path}` does not hold whole tokens of {dtype}",
                why=f"it has {counted(size, 'byte')}, a token has {dtype.itemsize}",
                hint="the file is cut short, or has another token type; give it with `--dtype`",
            )
        start = at = 0
        with bin_path.open("rb") as file:
            while (tokens := np.fromfile(file, dtype=dtype, count=_PIECE_TOKENS)).size:
                ends = np.flatnonzero(tokens == eod) + at + 1
                if ends.size:
                    self._add(np.diff(ends, prepend=start), bin_path)
                    start = int(ends[-1])
                at += tokens.size
        if not len(self._sizes):
            self.close()
            raise DataError(
                f"token {eod} does not occur in `{bin_path}`",
                why=f"the file has {counted(at, 'token')} of {dtype}",
                hint="check `--eod` and `--dtype`; without end-of-document tokens an index cannot "
                "be rebuilt",
            )
        self.unended = at - start
        if self.unended:
            self._add(np.array([self.unended]), bin_path)

    def _add(self, sizes: Integers, bin_path: Path) -> None:
        if int(sizes.max()) > _LARGEST_SIZE:
            self.close()
            raise DataError(
                f"`{bin_path}`: a document of {sizes.max()} tokens",
                why=f"the format allows at most {_LARGEST_SIZE}",
                hint="check `--eod` and `--dtype`",
            )
        self._sizes.extend(sizes)
