"""Division of a corpus into documents for training, validation and test (`--split`)."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import accumulate, pairwise

from lmcore.base.errors import DataError, counted
from lmcore.config.derived.data_source import PARTS, Part
from lmcore.config.derived.split import DataSplit
from lmcore.config.section.data import SPLIT_RULES

__all__ = ["LONG_NAME", "more_documents", "split_documents", "split_ranges"]

LONG_NAME = {"train": "training", "valid": "validation", "test": "test"}
"""Names of the parts in messages."""


def split_documents(
    num_documents: int, split: DataSplit, rule: str = SPLIT_RULES[0]
) -> tuple[int, int, int, int]:
    """Return the bounds of the training, validation and test documents.

    By the rule `megatron-core` the sum of the shares up to each bound is rounded.  By the rule
    `legacy` each share is rounded separately, and the rounding error of their sum shifts every
    bound but the first.

    Args:
        num_documents: Number of documents in the corpus.
        split: Value of `--split`.
        rule: Value of `--split-rule`.

    Source:
        megatron-core, `parse_and_normalize_split` and `convert_split_vector_to_split_matrix` in
        `megatron/core/datasets/blended_megatron_dataset_config.py`; Megatron-LM,
        `get_train_valid_test_split_` in `megatron/legacy/data/dataset_utils.py`.  Here bounds of
        the rule `legacy` stay between 0 and *num_documents*, unlike there.
    """
    train, valid, test = _RULES[rule](split.shares, num_documents)
    return 0, train, valid, test


def _megatron_core(shares: tuple[float, float, float], num_documents: int) -> list[int]:
    total = shares[0] + shares[1] + shares[2]  # not `sum`: Python 3.12 compensates its rounding
    cumulative = accumulate(share / total for share in shares)
    return [round(bound * num_documents) for bound in cumulative]


def _legacy(shares: tuple[float, float, float], num_documents: int) -> list[int]:
    total = math.fsum(shares)
    bounds = list(accumulate(round(share / total * num_documents) for share in shares))
    surplus = bounds[-1] - num_documents
    return [min(max(bound - surplus, 0), num_documents) for bound in bounds]


_RULES = dict(zip(SPLIT_RULES, (_megatron_core, _legacy), strict=True))


def split_ranges(
    num_documents: int, split: DataSplit, *, needed: Collection[Part], rule: str = SPLIT_RULES[0]
) -> dict[Part, tuple[int, int]]:
    """Return the first document of each part, and the one after the last.

    Args:
        num_documents: Number of documents in the corpus.
        split: Value of `--split`.
        needed: Parts that the run reads; others may be empty (`--split 100,0,0` with
            `--eval-iters 0`).
        rule: Value of `--split-rule`.

    Raises:
        DataError: A needed part has no documents.
    """
    bounds = split_documents(num_documents, split, rule)
    ranges = dict(zip(PARTS, pairwise(bounds), strict=True))
    for part, (start, end) in ranges.items():
        if part in needed and start == end:
            are = "is" if num_documents == 1 else "are"
            hint = more_documents(num_documents, len(needed))
            if part != "train":
                hint += "; `--eval-iters 0` trains without validation"
            raise DataError(
                f"`--split {split.text}` leaves no {LONG_NAME[part]} documents",
                why=f"{counted(num_documents, 'document')} {are} divided at {list(bounds)}",
                hint=hint,
            )
    return ranges


def more_documents(num_documents: int, num_parts: int) -> str:
    """Return the hint for a part without documents.

    Args:
        num_documents: Number of documents that are divided.
        num_parts: Number of parts that need some.
    """
    hint = "prepare a corpus of more documents"
    if num_documents < num_parts:  # no shares divide so few, such as a book in one text file
        return (
            f"{hint}, such as the paragraphs of a text file: `lmcore data prepare --input FILE "
            "--document-per paragraph`"
        )
    return f"{hint}, or give this part a larger share"
