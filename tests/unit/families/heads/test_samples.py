"""Sequences of pairs of texts, cut to a length, and micro-batches of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmcore.data.task.dataset import TaskSample
from lmcore.families.heads.samples import PairFormat, TaskCollation

ENCODER = PairFormat(9, (1,), (2,), (2,), pad=0, bidirectional=True, second_type=1)
DECODER = PairFormat(9, (), (5,), (), pad=7, bidirectional=False)


def numbers(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def sample(first: Any, *second: Any, label: int = 0, weight: float = 1.0) -> TaskSample:
    return TaskSample(first, second, label, weight)


def test_encoder() -> None:
    """`[CLS] a [SEP] b [SEP]` with segments and padding, and `[CLS] a [SEP]`."""
    batch = TaskCollation(ENCODER, 0)(
        [
            sample(numbers(10, 11), numbers(20, 21, 22), label=3),
            sample(numbers(12, 13, 14), label=1, weight=0.0),
        ],
        0,
    )
    assert batch["tokens_BS"].tolist() == [
        [1, 10, 11, 2, 20, 21, 22, 2, 0],
        [1, 12, 13, 14, 2] + [0] * 4,
    ]
    assert batch["types_BS"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 0], [0] * 9]
    assert batch["padding_BS"].tolist() == [[False] * 8 + [True], [False] * 5 + [True] * 4]
    assert batch["pooled_B"].tolist() == [0, 0]
    assert batch["label_Q"].tolist() == [3, 1]
    assert batch["label_weight_Q"].tolist() == [1.0, 0.0]
    assert "choices_QC" not in batch


def test_encoder_with_one_segment() -> None:
    """A model with one embedding of segments, or none, gets no second segment."""
    batch = TaskCollation(replace(ENCODER, second_type=0), 0)([sample(numbers(9), numbers(8))], 0)
    assert not batch["types_BS"].any()


def test_decoder() -> None:
    """Texts joined by a line end; the last token is pooled; no segments."""
    found = [sample(numbers(10, 11), numbers(20)), sample(numbers(12))]
    batch = TaskCollation(DECODER, 0)(found, 0)
    assert batch["tokens_BS"].tolist() == [[10, 11, 5, 20, *[7] * 5], [12, *[7] * 8]]
    assert batch["pooled_B"].tolist() == [3, 0]
    assert {"types_BS", "padding_BS"}.isdisjoint(batch)


def test_choices() -> None:
    """A sequence for each choice; of a choice that a question lacks, one that does not count."""
    found = [
        sample(numbers(10), numbers(20), numbers(21), numbers(22), label=2),
        sample(numbers(11), numbers(23), numbers(24), label=1),
    ]
    batch = TaskCollation(DECODER, 3)(found, 0)
    assert batch["tokens_BS"][:, :4].tolist() == [
        *([10, 5, 20, 7], [10, 5, 21, 7], [10, 5, 22, 7]),
        *([11, 5, 23, 7], [11, 5, 24, 7], [7, 7, 7, 7]),
    ]
    assert batch["choices_QC"].tolist() == [[True] * 3, [True, True, False]]
    assert batch["label_Q"].tolist() == [2, 1]


def reference(a: list[int], b: list[int], room: int) -> tuple[list[int], list[int]]:
    """Drop single tokens off the longer text, of the second if they are equal."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    return a, b


def test_cut() -> None:
    """Tokens are cut off the longer text, one by one, until both fit."""
    for size_a, size_b, length in itertools.product(range(9), range(9), range(5, 12)):
        a, b = list(range(100, 100 + size_a)), list(range(200, 200 + size_b))
        pairs = replace(ENCODER, length=length)
        tokens, start = pairs.join(numbers(*a), numbers(*b))
        cut_a, cut_b = reference(a, b, length - 3)
        assert tokens.tolist() == [1, *cut_a, 2, *cut_b, 2]
        assert start == len(cut_a) + 2


@pytest.mark.parametrize("pairs", [ENCODER, DECODER])
def test_a_long_single_text(pairs: PairFormat) -> None:
    """It is cut at its end; the special tokens stay."""
    tokens, _ = pairs.join(numbers(*range(10, 30)), None)
    assert len(tokens) == 9
    assert tokens[-1] == (2 if pairs.bidirectional else 18)
