"""Division of a corpus into documents for training, validation and test (`--split`)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from lmcore.config.data_source import PARTS, Part
from lmcore.config.split import parse_split
from lmcore.errors import DataError

__all__ = ["LONG_NAME", "split_documents", "split_ranges"]

LONG_NAME = {"train": "training", "valid": "validation", "test": "test"}
"""Names of the parts in messages."""


def split_documents(num_documents: int, split: str) -> list[int]:
    """Return the four bounds of the training, validation and test documents.

    Each share is rounded by itself; the rounding error of their sum shifts every bound but the
    first.

    Args:
        num_documents: Number of documents in the corpus.
        split: Value of `--split`.

    Raises:
        ConfigError: *split* is malformed.

    Source:
        Megatron-LM, `get_train_valid_test_split_` in `megatron/legacy/data/dataset_utils.py`.  Here
        bounds stay between 0 and *num_documents*, unlike there.
    """
    bounds = [0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + round(share * num_documents))
    surplus = bounds[-1] - num_documents
    return [0] + [min(max(bound - surplus, 0), num_documents) for bound in bounds[1:]]


def split_ranges(
    num_documents: int, split: str, *, needed: Collection[Part]
) -> dict[Part, tuple[int, int]]:
    """Return the first document of each part, and the one after the last.

    Args:
        num_documents: Number of documents in the corpus.
        split: Value of `--split`.
        needed: Parts that the run reads; others may be empty (`--split 100,0,0` with
            `--eval-iters 0`).

    Raises:
        ConfigError: *split* is malformed.
        DataError: A needed part has no documents.
    """
    bounds = split_documents(num_documents, split)
    ranges = dict(zip(PARTS, pairwise(bounds), strict=True))
    for part, (start, end) in ranges.items():
        if part in needed and start == end:
            hint = "prepare a corpus of more documents, or give this part a larger share"
            if part != "train":
                hint += "; `--eval-iters 0` trains without validation"
            raise DataError(
                f"`--split {split}` leaves no {LONG_NAME[part]} documents",
                why=f"{num_documents} documents are divided at {bounds}",
                hint=hint,
            )
    return ranges
