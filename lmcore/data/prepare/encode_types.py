"""Records of `encode.py`: settings of the workers, and the tokens of a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcore.data.input.problem import InputProblem, Reason

if TYPE_CHECKING:
    from lmcore.data.prepare.sentences import SentenceSplitter

__all__ = ["EncodePlan", "EncodedBatch", "KeyTokens"]


@dataclass(frozen=True)
class EncodePlan:
    """Settings of every worker, besides the tokenizer.

    Attributes:
        keys: JSON keys whose text is encoded.
        end: id appended to each document, or None.
        dtype: type of a stored token.
        stop: end the batch at the first bad document.
        splitter: sentence splitter, one sequence per sentence; None: one sequence per document.
    """

    keys: tuple[str, ...]
    end: int | None
    dtype: np.dtype[np.integer]
    stop: bool
    splitter: SentenceSplitter | None = None


@dataclass(frozen=True)
class KeyTokens:
    """Documents of one key that have tokens.

    Attributes:
        tokens: (tokens,), concatenated over all documents.
        lengths: (sequences,), number of tokens of each sequence.
        empty: number of documents left out.
        per_document: (documents,), number of sequences of each document; None: one each.
    """

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    empty: int
    per_document: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class EncodedBatch:
    """Tokens of a batch of documents.

    Attributes:
        keys: one entry per key, in the order of the plan.
        documents: number of documents with all keys.
        json_bytes: size of the input, in bytes, uncompressed.
        skipped: number of documents left out, by reason.
        problem: the first bad document, if any.
    """

    keys: tuple[KeyTokens, ...]
    documents: int
    json_bytes: int
    skipped: Counter[Reason] = field(default_factory=Counter)
    problem: InputProblem | None = None
