"""Byte-level BPE and WordPiece in C++, if built: from whole blocks of JSON lines to token ids.

The reference in Python is `split_words` and `python_bpe`, and `bert_pretokenizer` and `wordpiece`,
which define the ids, and `lmcore.data.prepare.encode`, which takes every line that C++ does not
accept as certainly valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    "NativeEncoder",
    "native_bpe",
    "native_wordpiece",
]

Integers = npt.NDArray[np.integer]
Column = tuple[Integers, npt.NDArray[np.int32], int]
"""Result for a key: concatenated tokens, lengths of the documents, number of empty documents."""


@dataclass(frozen=True)
class BlockTokens:
    """Tokens of a block of JSON lines.

    Attributes:
        columns: one entry per key.
        documents: number of lines that were objects with all keys.
        doubts: (lines left to Python, 3 + 2 * keys), int64: number of the line in the block from 0,
            its first and last byte offset, then for each key the number of tokens and of documents
            in `columns` before it.
    """

    columns: tuple[Column, ...]
    documents: int
    doubts: npt.NDArray[np.int64]


@runtime_checkable
class EncodesBlocks(Protocol):
    """Tokenizer that encodes blocks of JSON lines, in several threads at a time."""

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block, each document followed by *end*; None if not supported."""

    @property
    def threads(self) -> bool:
        """True if `encode_block` is available and releases the interpreter's lock."""


class _Library(Protocol):
    """Interface of `lmcore._native.ByteBpe` and `lmcore._native.WordPiece`."""

    def encode_texts(
        self, texts: Sequence[str], threads: int
    ) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int64]]: ...

    def encode_block_narrow(
        self, data: bytes, keys: list[bytes], end_id: int
    ) -> tuple[list[Column], int, int, npt.NDArray[np.int64]]: ...

    def encode_block_wide(
        self, data: bytes, keys: list[bytes], end_id: int
    ) -> tuple[list[Column], int, int, npt.NDArray[np.int64]]: ...


class NativeEncoder:
    """Encoder of `lmcore._native`; thread-safe.

    Args:
        library: the encoder in C++.
        encode_left: returns the ids of a text that C++ leaves to Python; None: it leaves none.
    """

    def __init__(
        self, library: _Library, encode_left: Callable[[str], list[int]] | None = None
    ) -> None:
        self._library, self._encode_left = library, encode_left

    def encode_texts(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text.

        Raises:
            UnicodeEncodeError: a text contains a lone surrogate.
        """
        (ids,), lengths = self._library.encode_texts(texts, 1)
        if not len(lengths):
            return []
        arrays = np.split(ids, np.cumsum(np.maximum(lengths[:-1], 0)))
        if self._encode_left is not None:
            for i in np.flatnonzero(lengths < 0).tolist():
                arrays[i] = np.array(self._encode_left(texts[i]), dtype=np.int32)
        return arrays

    def encode_flat(
        self, texts: Sequence[str], threads: int
    ) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int64]]:
        """Return the concatenated ids of all texts, one array per thread, and the lengths.

        The length of a text that C++ leaves to Python is -1.
        """
        return self._library.encode_texts(texts, threads)

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block of JSON lines; None unless *dtype* is uint16 or int32."""
        if dtype == np.uint16:
            encode = self._library.encode_block_narrow
        elif dtype == np.int32:
            encode = self._library.encode_block_wide
        else:
            return None
        spelt = [key.encode() for key in keys]
        columns, documents, _, doubts = encode(block, spelt, -1 if end is None else end)
        return BlockTokens(tuple(columns), documents, doubts)


def native_bpe(vocabulary: Mapping[str, int], merges: Sequence[Merge]) -> NativeEncoder | None:
    """Return the encoder of a vocabulary that `require_match` accepted; None without C++."""
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
    return NativeEncoder(make(bytes_, rules))


def native_wordpiece(
    tokens: Sequence[str],
    unknown: int,
    *,
    page: Callable[[int], tuple[list[str], bytes]],
    encode_left: Callable[[str], list[int]],
) -> NativeEncoder | None:
    """Return the WordPiece encoder of a vocabulary; None without C++.

    Args:
        tokens: spelling of each id.
        unknown: id of a word without pieces.
        page: returns the rules of 256 characters, see `bert_pretokenizer.character_page`.
        encode_left: returns the ids of a text in Python.
    """
    make = getattr(builders, "WordPiece", None)
    if make is None:
        return None
    return NativeEncoder(make(tokens, unknown, page), encode_left)
