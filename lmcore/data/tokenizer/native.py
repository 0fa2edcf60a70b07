"""Byte-level BPE in C++, where it was built: whole blocks of JSON lines to token ids at once.

The twins of what is here are `split_words` and `python_bpe`, which define the ids, and
`lmcore.data.prepare.encode`, to which every line goes that is not certainly right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lmcore.data.native import builders
from lmcore.data.tokenizer.bpe_files import Merge, byte_alphabet

__all__ = [
    "BlockTokens",
    "Column",
    "EncodesBlocks",
    "NativeBPE",
    "native_bpe",
]

Integers = npt.NDArray[np.integer]
Column = tuple[Integers, npt.NDArray[np.int32], int]
"""Of a key: its documents' tokens one after another, their lengths, and how many were empty."""


@dataclass(frozen=True)
class BlockTokens:
    """What a block of JSON lines gave.

    Attributes:
        columns: One entry of each key.
        documents: Lines that were objects with all keys.
        doubts: int64, a row for each line that is left to Python: its place in the block from 0,
            where it begins and ends, then for each key how many tokens and how many documents of
            `columns` come before it.
    """

    columns: tuple[Column, ...]
    documents: int
    doubts: npt.NDArray[np.int64]


@runtime_checkable
class EncodesBlocks(Protocol):
    """A tokenizer that takes blocks of JSON lines, from several threads at a time."""

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block, each document followed by *end*; None: this one cannot."""

    @property
    def threads(self) -> bool:
        """Whether `encode_block` is there and leaves the interpreter free."""


class _Library(Protocol):
    """`lmcore._native.ByteBpe`."""

    def encode_texts(
        self, texts: Sequence[str], threads: int
    ) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int64]]: ...

    def encode_block_narrow(
        self, data: bytes, keys: list[bytes], end_id: int
    ) -> tuple[list[Column], int, int, npt.NDArray[np.int64]]: ...

    def encode_block_wide(
        self, data: bytes, keys: list[bytes], end_id: int
    ) -> tuple[list[Column], int, int, npt.NDArray[np.int64]]: ...


class NativeBPE:
    """Encodes with `lmcore._native`; safe to share between threads."""

    def __init__(self, library: _Library) -> None:
        self._library = library

    def encode_texts(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text.

        Raises:
            UnicodeEncodeError: A text holds a lone surrogate.
        """
        (ids,), lengths = self._library.encode_texts(texts, 1)
        return np.split(ids, np.cumsum(lengths[:-1])) if len(lengths) else []

    def encode_flat(
        self, texts: Sequence[str], threads: int
    ) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int64]]:
        """Return the ids of all texts one after another, an array a thread, and the lengths."""
        return self._library.encode_texts(texts, threads)

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block of JSON lines, or None for another type than two."""
        if dtype == np.uint16:
            encode = self._library.encode_block_narrow
        elif dtype == np.int32:
            encode = self._library.encode_block_wide
        else:
            return None
        spelt = [key.encode() for key in keys]
        columns, documents, _, doubts = encode(block, spelt, -1 if end is None else end)
        return BlockTokens(tuple(columns), documents, doubts)


def native_bpe(vocabulary: Mapping[str, int], merges: Sequence[Merge]) -> NativeBPE | None:
    """Return the encoder of a vocabulary that `require_match` took; None where none was built."""
    make = getattr(builders, "ByteBpe", None)
    if make is None:
        return None
    id_of = vocabulary.__getitem__
    count = len(merges)
    rules = np.empty((count, 3), dtype=np.int32)
    pairs = map(id_of, chain.from_iterable(merges))
    rules[:, :2] = np.fromiter(pairs, np.int32, 2 * count).reshape(count, 2)
    rules[:, 2] = np.fromiter(map(id_of, map("".join, merges)), np.int32, count)
    bytes_ = np.array(list(map(id_of, byte_alphabet())), dtype=np.int32)
    return NativeBPE(make(bytes_, rules))
