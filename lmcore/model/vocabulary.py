"""Rows of the vocabulary: how many an embedding has for some tokens."""

from __future__ import annotations

__all__ = ["USUAL_MULTIPLE", "pad_vocab_size", "vocabulary_multiple"]

USUAL_MULTIPLE = 128
"""Default of `--make-vocab-size-divisible-by`."""


def pad_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Return *vocab_size* rounded up to a multiple of *divisible_by* * *tensor_parallel_size*."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def vocabulary_multiple(vocab_size: int, rows: int, *, tensor_parallel_size: int = 1) -> int:
    """Return the `divisible_by` with which `pad_vocab_size` gives *rows*; the usual one if it does.

    Args:
        vocab_size: Number of tokens, at most *rows*.
        rows: Rows of the embedding, which the ranks can divide.
        tensor_parallel_size: Number of ranks of tensor parallelism.
    """
    largest = rows // tensor_parallel_size
    smaller = [USUAL_MULTIPLE >> shift for shift in range(USUAL_MULTIPLE.bit_length())]
    larger = [USUAL_MULTIPLE << shift for shift in range(1, largest.bit_length())]
    candidates: list[int] = [*smaller, *range(USUAL_MULTIPLE, 0, -1), *larger]
    for multiple in candidates:
        padded = pad_vocab_size(
            vocab_size, divisible_by=multiple, tensor_parallel_size=tensor_parallel_size
        )
        if padded == rows:
            return multiple
    return largest  # which gives the rows for any vocabulary
