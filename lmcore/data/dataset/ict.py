"""Samples of the inverse cloze task: a sentence, and the block of text that it was taken from.

A model learns to find the block by the sentence.  Blocks are Megatron's (`build_block_mapping`);
what is drawn in a sample follows here from its number, so that a resumed run sees the same, which
upstream's single generator did not give.  Shapes: S sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.data.dataset.sentence_index_cache import BlockRequest
from lmcore.data.dataset.sentence_samples import SampleChoice, SentenceDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.errors import DataError

__all__ = ["ICTDataset", "ICTSample", "ICTSettings", "ICTVocabulary"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 3  # one before the title, one after it, one after the block


@dataclass(frozen=True)
class ICTVocabulary:
    """Ids around segments.

    Attributes:
        cls: Begins a sequence.
        sep: Ends a segment.
        pad: Fills up.
    """

    cls: int
    sep: int
    pad: int


@dataclass(frozen=True)
class ICTSettings:
    """How samples are made.

    Attributes:
        sequence_length: S, of query and block each.
        seed: 0 to 2**31 - 1; of the mapping, and with a sample's number added, of its draws.
        query_in_block_probability: How often the query stays in its block
            (`--query-in-block-prob`).
        one_sentence: Take documents of a single sentence, too (`--use-one-sent-docs`).
    """

    sequence_length: int
    seed: int
    query_in_block_probability: float = 0.1
    one_sentence: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < _SPECIAL_TOKENS + 2:
            raise ValueError(f"{self.sequence_length=}")
        if not 0 <= self.query_in_block_probability <= 1:
            raise ValueError(f"{self.query_in_block_probability=}")


@dataclass(frozen=True)
class ICTSample:
    """One sample.

    Attributes:
        query_tokens_S: int64, a sentence.
        query_mask_S: int64, 0 at padding.
        block_tokens_S: int64, title and block.
        block_mask_S: int64, 0 at padding.
        block: First sentence, the one after the last, document, and the block's number.
    """

    query_tokens_S: Int64
    query_mask_S: Int64
    block_tokens_S: Int64
    block_mask_S: Int64
    block: tuple[int, int, int, int]


class ICTDataset(SentenceDataset):
    """Samples of the inverse cloze task, in the order of training.

    Args:
        indexed: One sequence a sentence.
        titles: One sequence a document of *indexed* (`--titles-data-path`); None: no titles.
        vocabulary: Ids around segments.
        settings: How samples are made.
        **chosen: `document_range`, `num_samples` and so on, as `SentenceDataset` takes them.  An
            epoch has each block once, as an index over all blocks takes them.

    Raises:
        DataError: The titles do not belong to the documents, or these make no block; see also
            `load_or_build`.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        titles: IndexedDataset | None,
        vocabulary: ICTVocabulary,
        settings: ICTSettings,
        **chosen: Unpack[SampleChoice],
    ) -> None:
        if titles is not None and len(titles) != indexed.document_count:
            raise DataError(
                f"`{titles.prefix}` has {len(titles)} titles for {indexed.document_count} "
                f"documents of `{indexed.prefix}`",
                hint="prepare both from the same file, the titles without `--split-sentences`",
            )
        self.vocabulary, self.settings, self._titles = vocabulary, settings, titles
        self._first_document = chosen["document_range"][0]
        # Half of the sequence at most: a longer title would leave no room for its block.
        self._longest_title = (settings.sequence_length - _SPECIAL_TOKENS) // 2
        request = functools.partial(
            BlockRequest,
            longest=settings.sequence_length - _SPECIAL_TOKENS,
            seed=settings.seed,
            one_sentence=settings.one_sentence,
            titles=titles,
            longest_title=self._longest_title,
        )
        super().__init__(indexed, request, **chosen)

    def __getitem__(self, i: int) -> ICTSample:
        """Return sample *i*.

        Raises:
            IndexError: No such sample.
        """
        first, last, document, number = self.samples.row(i)
        sentences = self.samples.sentences(first, last)
        rng = self.samples.random(i)
        chosen = int(rng.randint(0, len(sentences)))
        stays = rng.random_sample() < self.settings.query_in_block_probability
        query = sentences[chosen]
        if not stays and len(sentences) > 1:  # alone it stays: an empty block teaches nothing
            del sentences[chosen]
        query_tokens_S, query_mask_S = self._padded([query[: self._room(0)]])
        block_tokens_S, block_mask_S = self._with_title(sentences, document)
        block = (first, last, self._first_document + document, number)
        return ICTSample(query_tokens_S, query_mask_S, block_tokens_S, block_mask_S, block)

    def block(self, i: int) -> tuple[Int64, Int64]:
        """Return the whole block of sample *i* with its title, and its mask: int64 [S] each."""
        first, last, document, _ = self.samples.row(i)
        return self._with_title(self.samples.sentences(first, last), document)

    def _with_title(self, sentences: list[Int64], document: int) -> tuple[Int64, Int64]:
        """Return title and block, padded, and their mask."""
        text = np.concatenate(sentences)
        if self._titles is None:
            return self._padded([text[: self._room(0)]])
        title = self._titles.get(self._first_document + document)[: self._longest_title]
        return self._padded([title, text[: self._room(len(title) + 1)]])

    def _room(self, used: int) -> int:
        """Return how many tokens a segment may have, beside a title and its end of *used*."""
        return self.settings.sequence_length - 2 - used

    def _padded(self, segments: list[npt.NDArray[np.integer]]) -> tuple[Int64, Int64]:
        pieces: list[list[int]] = [[self.vocabulary.cls]]
        for segment in segments:
            pieces += [segment.tolist(), [self.vocabulary.sep]]
        joined = [token for piece in pieces for token in piece]
        tokens_S = np.full(self.settings.sequence_length, self.vocabulary.pad, dtype=np.int64)
        mask_S = np.zeros(self.settings.sequence_length, dtype=np.int64)
        tokens_S[: len(joined)] = joined
        mask_S[: len(joined)] = 1
        return tokens_S, mask_S
