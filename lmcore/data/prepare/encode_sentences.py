"""From texts to documents of several sequences: the part of `encode.py` that knows sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from lmcore.data.prepare.encode_types import KeyTokens
from lmcore.data.prepare.sentence.base import SentenceSplitter
from lmcore.data.tokenizer import Tokenizer

__all__ = ["encode_sentences"]


def encode_sentences(
    texts: Sequence[str], tokenizer: Tokenizer, splitter: SentenceSplitter, end: int | None
) -> KeyTokens:
    """Encode each sentence of each text as a sequence; *end* goes to a text's last one only.

    A sentence without tokens is dropped, a text without sentences is counted as empty.
    """
    split = [list(splitter.split(text)) for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for text in split for sentence in text]))
    pieces: list[npt.NDArray[np.integer]] = []
    lengths: list[int] = []
    per_document: list[int] = []
    last = np.array([] if end is None else [end], dtype=np.int32)
    for sentences in split:
        kept = [ids for ids in islice(encoded, len(sentences)) if len(ids)]
        if not kept:
            continue
        pieces += [*kept, last]
        lengths += map(len, kept)
        lengths[-1] += len(last)  # the end counts: a size without it moves all that follows
        per_document.append(len(kept))
    return KeyTokens(
        np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        len(texts) - len(per_document),
        np.array(per_document, dtype=np.int32),
    )
