"""Samples of the inverse cloze task (ICT): a sentence, and the block of text around it.

A model learns to retrieve the block by the sentence.  Shapes: S sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.data.dataset.sentence_dataset import DatasetOptions, SentenceDataset
from lmcore.data.dataset.sentence_index_cache import BlockRequest
from lmcore.data.indexed.dataset import IndexedDataset

__all__ = ["ICTDataset", "ICTSample", "ICTSettings", "ICTVocabulary"]

Int64 = npt.NDArray[np.int64]

_SPECIAL_TOKENS = 3  # before the title, after it, and after the block


@dataclass(frozen=True)
class ICTVocabulary:
    """Special token ids.

    Attributes:
        cls: Id that begins a sequence.
        sep: Id that ends a segment.
        pad: Id of the padding.
    """

    cls: int
    sep: int
    pad: int


@dataclass(frozen=True)
class ICTSettings:
    """Settings of ICT samples.

    Attributes:
        sequence_length: S of query and block each, in tokens.
        seed: Seed of the sentence index, and plus a sample's number, of its draws; 0 to
            2**31 - 1.
        query_in_block_probability: Fraction of samples whose block keeps the query
            (`--query-in-block-prob`).
        one_sentence: True to include documents of a single sentence (`--use-one-sent-docs`).
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
    """ICT sample.

    Attributes:
        query_tokens_S: int64, a sentence.
        query_mask_S: int64, 0 at padding.
        block_tokens_S: int64, title and block.
        block_mask_S: int64, 0 at padding.
        block: First sentence, the one after the last, document, and number of the block.
    """

    query_tokens_S: Int64
    query_mask_S: Int64
    block_tokens_S: Int64
    block_mask_S: Int64
    block: tuple[int, int, int, int]


class ICTDataset(SentenceDataset):
    """Samples of the inverse cloze task, in the order of training.

    Args:
        indexed: Dataset with one sequence per sentence.
        titles: Dataset with one sequence per document of *indexed* (`--titles-data-path`); None:
            blocks have no titles.
        vocabulary: Special token ids.
        settings: Settings of the samples.
        **options: `document_range`, `num_samples` and others of `SentenceDataset`.  An epoch has
            each block once.

    Raises:
        DataError: The numbers of titles and documents differ, or the documents make no block;
            see also `load_or_build`.

    Source:
        Lee et al. 2019 (https://arxiv.org/abs/1906.00300).  The blocks are equal to the blocks
        of Megatron-LM's `ICTDataset`.  The draws within a sample are seeded by its number, so that
        a resumed run repeats them, unlike with Megatron's single generator.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        titles: IndexedDataset | None,
        vocabulary: ICTVocabulary,
        settings: ICTSettings,
        **options: Unpack[DatasetOptions],
    ) -> None:
        if titles is not None and len(titles) != indexed.document_count:
            raise DataError(
                f"`{titles.prefix}` has {counted(len(titles), 'title')} for "
                f"{counted(indexed.document_count, 'document')} of `{indexed.prefix}`",
                hint="prepare both from the same file, the titles without `--split-sentences`",
            )
        self.vocabulary, self.settings, self._titles = vocabulary, settings, titles
        self._first_document = options["document_range"][0]
        # At most half of the sequence: a longer title would leave no room for its block.
        self._longest_title = (settings.sequence_length - _SPECIAL_TOKENS) // 2
        request = functools.partial(
            BlockRequest,
            longest=settings.sequence_length - _SPECIAL_TOKENS,
            seed=settings.seed,
            one_sentence=settings.one_sentence,
            titles=titles,
            longest_title=self._longest_title,
        )
        super().__init__(indexed, request, **options)

    def __getitem__(self, i: int) -> ICTSample:
        """Return sample *i*.

        Raises:
            IndexError: *i* is not the number of a sample.
        """
        first, last, document, number = self.row(i)
        sentences = self.sentences(first, last)
        rng = self.random(i)
        chosen = int(rng.randint(0, len(sentences)))
        stays = rng.random_sample() < self.settings.query_in_block_probability
        query = sentences[chosen]
        if not stays and len(sentences) > 1:  # a block must not become empty
            del sentences[chosen]
        query_tokens_S, query_mask_S = self._padded([query[: self._room(0)]])
        block_tokens_S, block_mask_S = self._with_title(sentences, document)
        block = (first, last, self._first_document + document, number)
        return ICTSample(query_tokens_S, query_mask_S, block_tokens_S, block_mask_S, block)

    def block(self, i: int) -> tuple[Int64, Int64]:
        """Return the whole block of sample *i* with its title, and its mask: int64 [S] each."""
        first, last, document, _ = self.row(i)
        return self._with_title(self.sentences(first, last), document)

    def _with_title(self, sentences: list[Int64], document: int) -> tuple[Int64, Int64]:
        """Return title and block, padded, and their mask: int64 [S] each."""
        text = np.concatenate(sentences)
        if self._titles is None:
            return self._padded([text[: self._room(0)]])
        number = self._first_document + document
        with self._titles.reading(f"title {number}"):
            title = self._titles.get(number)[: self._longest_title].copy()
        return self._padded([title, text[: self._room(len(title) + 1)]])

    def _room(self, used: int) -> int:
        """Return the maximum tokens of a segment, if title and separator take *used* tokens."""
        return self.settings.sequence_length - 2 - used

    def _padded(self, segments: list[npt.NDArray[np.integer]]) -> tuple[Int64, Int64]:
        joined = [self.vocabulary.cls]
        for segment in segments:
            joined += [*segment.tolist(), self.vocabulary.sep]
        tokens_S = np.full(self.settings.sequence_length, self.vocabulary.pad, dtype=np.int64)
        mask_S = np.zeros(self.settings.sequence_length, dtype=np.int64)
        tokens_S[: len(joined)] = joined
        mask_S[: len(joined)] = 1
        return tokens_S, mask_S
