"""Document-boundary masks: position ids, attention and loss."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.data.loading.batch import CausalLMCollation
from lmcore.data.loading.loader import BatchLoader

EOD = 0
TOKENS = torch.tensor([[5, 6, EOD, 7, 8, 9, EOD, EOD, 4], [EOD, 1, 2, 3, 4, 5, 6, 7, 8]])


def test_by_hand():
    """The end belongs to its document; after it positions start at 0, with the next number."""
    masks = DocumentMasks(EOD, True, True, True)
    assert masks.positions(TOKENS).tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 0, 0],
        [0, 0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert masks.documents(TOKENS).tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 2, 3],
        [0, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert masks.loss_mask(TOKENS).tolist() == [
        [1, 1, 0, 1, 1, 1, 0, 0, 1],
        [0, 1, 1, 1, 1, 1, 1, 1, 1],
    ]


def test_only_the_given_outputs():
    """Nothing asked for, nothing changed."""
    masks = DocumentMasks(EOD)
    assert masks.positions(TOKENS) is None
    assert masks.documents(TOKENS) is None
    assert masks.loss_mask(TOKENS).sum() == TOKENS.numel()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_against_a_loop(tokens):
    """Positions and documents of any sample equal a loop's."""
    position = document = 0
    positions, documents = [], []
    for token in tokens:
        positions.append(position)
        documents.append(document)
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    masks, row = DocumentMasks(EOD, True, True), torch.tensor([tokens])
    assert masks.positions(row)[0].tolist() == positions
    assert masks.documents(row)[0].tolist() == documents


class Sample:
    """One sample of documents 3 and 2 long."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.array([1, 2, EOD, 3, EOD, 4], dtype=np.int64)


def test_batches_carry_them():
    """The loader makes them of the input tokens, and pins all that it makes."""
    pinned = []

    def pin(tensor):
        pinned.append(tensor)
        return tensor

    collation = CausalLMCollation(masks=DocumentMasks(EOD, True, True, True))
    with BatchLoader(Sample(), micro_batch_size=2, collation=collation, pin=pin) as loader:
        batch = next(loader)
    assert batch["loss_weight_BS"].tolist() == [[1, 1, 0, 1, 0]] * 2
    assert batch["positions_BS"].tolist() == [[0, 1, 2, 0, 1]] * 2
    assert batch["documents_BS"].tolist() == [[0, 0, 0, 1, 1]] * 2
    assert len(pinned) == 5
    with BatchLoader(Sample(), micro_batch_size=2) as loader:
        batch = next(loader)
    assert batch.keys() == {"tokens_BS", "targets_BS", "loss_weight_BS"}
