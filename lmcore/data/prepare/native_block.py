"""Merging of a block of JSON lines encoded in C++ with the lines left to Python.

C++ encodes only lines that are certainly valid.  Python encodes all other lines, or describes
their faults, and its tokens are inserted so that documents stay in the order of the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmcore.data.input.batch import LineBatch
from lmcore.data.prepare.encode_types import EncodedBatch, EncodePlan, KeyTokens
from lmcore.data.tokenizer.native import BlockTokens

__all__ = ["join_block"]

_TOKENS, _LENGTHS = 3, 4  # columns of `doubts` for the first key; two per key
_T = TypeVar("_T", bound=np.integer)


def join_block(
    batch: LineBatch,
    block: BlockTokens,
    plan: EncodePlan,
    encode_lines: Callable[[LineBatch], EncodedBatch],
) -> EncodedBatch:
    """Return the tokens of all lines of *batch*.

    Args:
        batch: the lines.
        block: result of C++.
        plan: settings of all workers; with `stop` the lines after the first bad one are dropped.
        encode_lines: encodes lines in Python.
    """
    columns = tuple(KeyTokens(*column) for column in block.columns)
    own = EncodedBatch(columns, block.documents, batch.size)
    places: list[npt.NDArray[np.int64]] = []
    pieces: list[EncodedBatch] = []
    for rows in _neighbours(block.doubts):
        begin, end = int(rows[0, 1]), int(rows[-1, 2])
        lines = LineBatch(batch.source, batch.first_line + int(rows[0, 0]), batch.block[begin:end])
        pieces.append(encode_lines(lines))
        places.append(rows[0])
        if plan.stop and pieces[-1].problem is not None:
            break
    if pieces:
        own = _spliced(own, places, pieces)
    return _with_problems(own, batch)


def _neighbours(doubts: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the lines left to Python in groups of adjacent lines."""
    if len(doubts):
        apart = np.flatnonzero(doubts[1:, 1] != doubts[:-1, 2]) + 1
        yield from np.split(doubts, apart)


def _spliced(
    own: EncodedBatch, places: list[npt.NDArray[np.int64]], pieces: list[EncodedBatch]
) -> EncodedBatch:
    keys = []
    for i, column in enumerate(own.keys):
        tokens = _inserted(
            column.tokens, [p[_TOKENS + 2 * i] for p in places], [e.keys[i].tokens for e in pieces]
        )
        lengths = _inserted(
            column.lengths,
            [p[_LENGTHS + 2 * i] for p in places],
            [e.keys[i].lengths for e in pieces],
        )
        empty = column.empty + sum(piece.keys[i].empty for piece in pieces)
        keys.append(KeyTokens(tokens, lengths, empty))
    problems = (piece.problem for piece in pieces if piece.problem is not None)
    return EncodedBatch(
        tuple(keys),
        own.documents + sum(piece.documents for piece in pieces),
        own.json_bytes,
        sum((piece.skipped for piece in pieces), Counter()),
        next(problems, None),
    )


def _inserted(
    values: npt.NDArray[_T], places: list[np.int64], pieces: list[npt.NDArray[_T]]
) -> npt.NDArray[_T]:
    parts = np.split(values, places)
    joined = [parts[0]]
    for piece, part in zip(pieces, parts[1:], strict=True):
        joined += [piece, part]
    return np.concatenate(joined)


def _with_problems(encoded: EncodedBatch, batch: LineBatch) -> EncodedBatch:
    """Add the problems found while the batch was read."""
    if not batch.problems:
        return encoded
    found = [*batch.problems, *([encoded.problem] if encoded.problem else [])]
    return replace(
        encoded,
        skipped=encoded.skipped + Counter(problem.reason for problem in batch.problems),
        problem=min(found, key=lambda problem: problem.line),
    )
