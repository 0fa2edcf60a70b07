"""Micro-batches of T5's samples, and the tokenizers that they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError
from lmcore.data.dataset.t5 import T5Sample
from lmcore.data.tokenizer import ByteTokenizer, SpecialIds
from lmcore.families.t5.samples import T5Collation, span_vocabulary


def numbers(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


SAMPLE = T5Sample(
    encoder_tokens_E=numbers(10, 30, 12, 0),
    decoder_tokens_D=numbers(1, 30, 11, 0, 0),
    labels_D=numbers(30, 11, 2, -1, -1),
    loss_mask_D=numbers(1, 1, 1, 0, 0),
    encoder_mask_E=numbers(1, 1, 1, 0),
    decoder_mask_D=numbers(1, 1, 1, 0, 0),
    truncated=False,
)


def test_batch() -> None:
    """Targets beyond the end are 0, with the weight 0."""
    batch = {name: one.tolist() for name, one in T5Collation()([SAMPLE], 0).items()}
    assert batch == {
        "tokens_BS": [[10, 30, 12, 0]],
        "padding_BS": [[False, False, False, True]],
        "decoder_tokens_BD": [[1, 30, 11, 0, 0]],
        "targets_BD": [[30, 11, 2, 0, 0]],
        "loss_weight_BD": [[1.0, 1.0, 1.0, 0.0, 0.0]],
    }


class Tokens(ByteTokenizer):
    """Tokenizer with special tokens of a test."""

    def __init__(self, special: SpecialIds, spellings: tuple[str, ...]) -> None:
        super().__init__()
        self.special, self.spellings = special, spellings


WHOLE = SpecialIds(cls=6, sep=7, pad=0, bos=1, eos=2, sentinels=(4, 5))
PIECES = ("<pad>", "<s>", "</s>", "##ing", "<x>", "<y>", "[CLS]", "[SEP]")


def test_vocabulary() -> None:
    """Special tokens, sentinels, and the pieces that continue a word."""
    found = span_vocabulary(Tokens(WHOLE, PIECES))
    assert (found.bos, found.eos, found.pad, found.sentinels) == (1, 2, 0, (4, 5))
    assert (found.words.cls, found.words.sep) == (6, 7)
    assert found.words.continues.nonzero()[0].tolist() == [3]


def test_vocabulary_of_the_original() -> None:
    """Padding begins a text, and sentinels are found by their spelling, the first one last."""
    pieces = ("<pad>", "</s>", "a", "<extra_id_1>", "<extra_id_0>")
    found = span_vocabulary(Tokens(SpecialIds(pad=0, eos=1), pieces))
    assert (found.bos, found.eos, found.sentinels) == (0, 1, (4, 3))
    assert (found.words.cls, found.words.sep) == (0, 1)


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"sentinels": ()}, "its vocabulary has no sentinels"),
        ({"bos": None, "pad": 3}, "its vocabulary has no token that begins a text"),
        ({"eos": None, "sep": None}, "its vocabulary has no token that ends a text"),
        ({"pad": 2}, "no padding beside the token that ends a text"),
    ],
)
def test_vocabularies_that_are_refused(changed: dict[str, Any], why: str) -> None:
    """The error says what is missing."""
    with pytest.raises(ConfigError) as caught:
        span_vocabulary(Tokens(dataclasses.replace(WHOLE, **changed), PIECES))
    assert why in str(caught.value)
    assert "--vocab-extra-ids 100" in str(caught.value.hint)
