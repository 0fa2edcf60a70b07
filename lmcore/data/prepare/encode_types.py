"""What goes into encoding a batch of documents and what comes out: the records of `encode.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcore.data.input.problem import Problem, Reason

if TYPE_CHECKING:
    from lmcore.data.prepare.sentence.base import SentenceSplitter

__all__ = ["EncodePlan", "EncodedBatch", "KeyTokens"]


@dataclass(frozen=True)
class EncodePlan:
    """What every worker needs to know, beside the tokenizer.

    Attributes:
        keys: JSON keys whose text is encoded.
        end: Id appended to each document, or None.
        dtype: Type of a stored token.
        stop: Whether the first bad line ends the batch.
        splitter: Cuts documents into sentences, a sequence each; None: a document is one.
    """

    keys: tuple[str, ...]
    end: int | None
    dtype: np.dtype[np.integer]
    stop: bool
    splitter: SentenceSplitter | None = None


@dataclass(frozen=True)
class KeyTokens:
    """The documents of one key that have tokens.

    Attributes:
        tokens: Of all documents, one after another.
        lengths: Tokens of each sequence.
        empty: Number of documents left out.
        per_document: Sequences of each document; None: one.
    """

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    empty: int
    per_document: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True)
class EncodedBatch:
    """What a batch of lines gave.

    Attributes:
        keys: One entry of each key, in the plan's order.
        documents: Documents with all keys.
        json_bytes: Bytes of the input, uncompressed.
        skipped: Documents left out, by reason.
        problem: The first bad one, if any.
    """

    keys: tuple[KeyTokens, ...]
    documents: int
    json_bytes: int
    skipped: Counter[Reason] = field(default_factory=Counter)
    problem: Problem | None = None
