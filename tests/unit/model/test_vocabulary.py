"""Rows of the vocabulary, padded."""

from __future__ import annotations

import pytest

from lmcore.model.vocabulary import pad_vocab_size, vocabulary_multiple


def test_padded_vocabulary() -> None:
    """GPT-2's 50257 tokens become 50304 alone and 51200 over 8 devices."""
    assert pad_vocab_size(50257, divisible_by=128) == 50304
    assert pad_vocab_size(50257, divisible_by=128, tensor_parallel_size=8) == 51200
    assert pad_vocab_size(50304, divisible_by=128) == 50304


@pytest.mark.parametrize(
    "tokens,rows,ranks,expected",
    [
        (257, 384, 1, 128),
        (50257, 50304, 1, 128),
        (50257, 50432, 1, 256),  # of two ranks with 128
        (50257, 50304, 2, 64),
        (257, 257, 1, 1),
        (257, 300, 1, 100),
        (257, 400, 1, 400),
        (151665, 151936, 1, 151936),
        (257, 384, 3, 128),
    ],
)
def test_multiple_of_a_padded_vocabulary(tokens: int, rows: int, ranks: int, expected: int) -> None:
    """Padding with it gives the rows; the usual number of Megatron comes first."""
    assert vocabulary_multiple(tokens, rows, tensor_parallel_size=ranks) == expected
    padded = pad_vocab_size(tokens, divisible_by=expected, tensor_parallel_size=ranks)
    assert padded == rows
