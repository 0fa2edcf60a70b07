"""Micro-batches of BERT's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmcore.data.dataset.bert import BertSample
from lmcore.families.bert.samples import BertCollation, second_type


def numbers(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


SAMPLE = BertSample(
    tokens_S=numbers(1, 10, 2, 4, 2, 0),
    types_S=numbers(0, 0, 0, 1, 1, 0),
    labels_S=numbers(-1, -1, -1, 12, -1, -1),
    padding_mask_S=numbers(1, 1, 1, 1, 1, 0),
    loss_mask_S=numbers(0, 0, 0, 1, 0, 0),
    swapped=True,
    truncated=False,
)


@pytest.mark.parametrize("types", [0, 1, 2, 3])
def test_batch(types: int) -> None:
    """Its masked tokens by their places; with one embedding of segments, all have that one."""
    collation = BertCollation(2, binary_head=True, second_type=second_type(types))
    batch = {name: one.tolist() for name, one in collation([SAMPLE], 0).items()}
    assert batch == {
        "tokens_BS": [[1, 10, 2, 4, 2, 0]],
        "types_BS": [[0, 0, 0, 1, 1, 0] if types > 1 else [0] * 6],
        "padding_BS": [[False] * 5 + [True]],
        "chosen_BM": [[3, 0]],
        "targets_BM": [[12, 0]],
        "loss_weight_BM": [[1.0, 0.0]],
        "order_B": [1],
        "order_weight_B": [1.0],
    }
