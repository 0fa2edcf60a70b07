"""Encoding of documents sentence by sentence (`--split-sentences`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from lmcore.data.prepare.encode_types import KeyTokens
from lmcore.data.prepare.sentence.splitter import SentenceSplitter
from lmcore.data.tokenizer import Tokenizer

__all__ = ["encode_sentences"]


def encode_sentences(
    texts: Sequence[str], tokenizer: Tokenizer, splitter: SentenceSplitter, end: int | None
) -> KeyTokens:
    """Encode each sentence of each text as a sequence.

    A sentence without tokens is dropped; a text without sentences counts as empty.

    Args:
        texts: the documents.
        tokenizer: tokenizer of the sentences.
        splitter: sentence splitter.
        end: id appended to the last sentence of a document, or None.
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
        lengths[-1] += len(last)  # counted: an index without it would shift all later documents
        per_document.append(len(kept))
    return KeyTokens(
        np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        len(texts) - len(per_document),
        np.array(per_document, dtype=np.int32),
    )
