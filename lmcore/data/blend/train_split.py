"""How a corpus is divided into documents for training, validation and test."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from lmcore.config.split import parse_split
from lmcore.errors import DataError

__all__ = ["Part", "split_documents", "split_ranges"]

Part = Literal["train", "valid", "test"]
_PARTS: tuple[Part, ...] = ("train", "valid", "test")
_LONG_NAME = {"train": "training", "valid": "validation", "test": "test"}


def split_documents(num_documents: int, split: str) -> list[int]:
    """Return the four bounds of the training, validation and test documents.

    Megatron's rule: each share is rounded by itself, and the surplus or lack that the rounding
    leaves moves every bound but the first.  Bounds stay between 0 and *num_documents*, which
    upstream's do not always.

    Raises:
        ConfigError: *split* is malformed.
    """
    bounds = [0]
    for share in parse_split(split):
        bounds.append(bounds[-1] + round(share * num_documents))
    surplus = bounds[-1] - num_documents
    return [0] + [min(max(bound - surplus, 0), num_documents) for bound in bounds[1:]]


def split_ranges(
    num_documents: int, split: str, *, needed: Collection[Part]
) -> dict[Part, tuple[int, int]]:
    """Return first and end document of each part.

    Args:
        num_documents: Documents of the corpus.
        split: As in `--split`.
        needed: The parts that the run reads; others may be empty (`--split 100,0,0` with
            `--eval-iters 0`).

    Raises:
        ConfigError: *split* is malformed.
        DataError: A part that is needed gets no document.
    """
    bounds = split_documents(num_documents, split)
    ranges = {part: (bounds[i], bounds[i + 1]) for i, part in enumerate(_PARTS)}
    for part in _PARTS:
        start, end = ranges[part]
        if part in needed and start == end:
            raise DataError(
                f"`--split {split}` leaves no {_LONG_NAME[part]} documents",
                why=f"{num_documents} documents are divided at {bounds}",
                hint=_hint(part),
            )
    return ranges


def _hint(part: Part) -> str:
    more = "prepare a corpus of more documents, or give this part a larger share"
    return f"{more}; `--eval-iters 0` trains without evaluation" if part != "train" else more
