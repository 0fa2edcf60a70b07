"""Micro-batches of ICT's samples, and data that makes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.blend.sources import OpenSource, SampleSettings
from lmcore.data.dataset.ict import ICTSample, ICTSettings, ICTVocabulary
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import build_tokenizer
from lmcore.families.ict.samples import IctCollation, IctSamples, text_vocabulary


def numbers(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


SAMPLE = ICTSample(
    query_tokens_S=numbers(1, 10, 2, 0),
    query_mask_S=numbers(1, 1, 1, 0),
    block_tokens_S=numbers(1, 12, 13, 2),
    block_mask_S=numbers(1, 1, 1, 1),
    block=(0, 2, 0, 0),
)


def test_batch() -> None:
    """It has both texts, where each ends, and equal weights."""
    batch = {name: one.tolist() for name, one in IctCollation(14)([SAMPLE], 0).items()}
    assert batch == {
        "query_BS": [[1, 10, 2, 0]],
        "query_padding_BS": [[False, False, False, True]],
        "block_BS": [[1, 12, 13, 2]],
        "block_padding_BS": [[False] * 4],
        "query_weight_B": [1.0],
    }


def test_tokens_beyond_the_vocabulary() -> None:
    """They are an error that names the token."""
    with pytest.raises(DataError, match="token 13"):
        IctCollation(13)([SAMPLE], 0)


def test_documents_that_are_not_split(tmp_path: Path) -> None:
    """They are refused, unless documents of one sentence are wanted."""
    with IndexedDatasetWriter(tmp_path / "whole", "uint16") as writer:
        for _ in range(6):
            writer.add_document([5, 6, 7, 8], [4])
    source = OpenSource("whole", IndexedDataset(tmp_path / "whole"), (0, 6))
    settings = SampleSettings(16, 1, tmp_path, 0.8)
    made = ICTSettings(16, 0)
    with pytest.raises(DataError, match="not split into sentences"):
        IctSamples(made, ICTVocabulary(1, 2, 0)).build(source, None, settings, name="train")
    made = ICTSettings(16, 0, one_sentence=True)
    found = IctSamples(made, ICTVocabulary(1, 2, 0))
    assert len(found.build(source, None, settings, name="train")) == 6
    assert found.samples_per_epoch(source, settings) == 6


def test_a_tokenizer_without_special_tokens() -> None:
    """It is refused by name."""
    with pytest.raises(ConfigError, match=r"no `\[CLS\]`, no `\[SEP\]`"):
        text_vocabulary(build_tokenizer("ByteTokenizer"))
