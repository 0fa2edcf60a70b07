"""Samples of ICT: a sentence and the block around it, and how they become a micro-batch.

Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import ConfigError, counted
from lmcore.data.dataset.ict import ICTDataset, ICTSettings, ICTVocabulary
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.loading.batch import check_vocabulary
from lmcore.data.tokenizer import special_ids
from lmcore.families.sample_format import SampleFormat
from lmcore.families.sentences import refuse_named_texts, require_sentences

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.dataset.ict import ICTSample
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["IctCollation", "IctSamples", "samples", "text_vocabulary"]


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The tokenizer lacks a special token, the run has no sentences to read, or its
            titles do not belong to its data.
        DataError: The titles cannot be read.
    """
    refuse_named_texts(plan, "ICT")
    sources = [source for blend in plan.sources.blends() for source in blend.sources]
    ict, titles = plan.config.ict, None
    if ict.titles_data_path is not None:
        if len({source.name for source in sources}) > 1:
            raise ConfigError(
                "`--titles-data-path` is for one dataset",
                why="it has a title for each document of that, and the run reads "
                f"{counted(len(sources), 'dataset')}",
                hint="merge them by `lmcore data merge`, and their titles in the same order",
            )
        titles = IndexedDataset(ict.titles_data_path)
    settings = ICTSettings(
        sequence_length=plan.config.model.seq_length,
        seed=0,  # each source's, see `IctSamples`
        query_in_block_probability=ict.query_in_block_prob,
        one_sentence=ict.use_one_sent_docs,
    )
    builder = IctSamples(settings, text_vocabulary(tokenizer), titles)
    return SampleFormat(builder, IctCollation(tokenizer.vocab_size), sentences=True)


def text_vocabulary(tokenizer: Tokenizer) -> ICTVocabulary:
    """Return the special tokens of questions and blocks.

    Raises:
        ConfigError: The tokenizer lacks one.
    """
    special = special_ids(tokenizer)
    needed = {"[CLS]": special.cls, "[SEP]": special.sep}
    missing = [f"`{token}`" for token, found in needed.items() if found is None]
    if special.cls is None or special.sep is None:
        raise ConfigError(
            f"ICT cannot be trained with the tokenizer `{tokenizer.name}`",
            why=f"its vocabulary has no {', no '.join(missing)}",
            hint="use data that was prepared with `--tokenizer-type BertWordPieceLowerCase "
            "--vocab-file FILE`",
        )
    pad = 0 if special.pad is None else special.pad
    return ICTVocabulary(cls=special.cls, sep=special.sep, pad=pad)


@dataclass(frozen=True)
class IctSamples:
    """Builder of ICT's samples; see `SampleBuilder`.

    Attributes:
        settings: Settings of the samples, without the seed.
        vocabulary: Special tokens.
        titles: Title of each document; None: there are none.
    """

    settings: ICTSettings
    vocabulary: ICTVocabulary
    titles: IndexedDataset | None = None

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> ICTDataset:
        """Return the `ICTDataset` of a source."""
        if not self.settings.one_sentence:
            other = "; or, if its documents are single sentences, add `--use-one-sent-docs`"
            require_sentences(source, "ICT", hint=other)
        return ICTDataset(
            source.indexed,
            self.titles,
            self.vocabulary,
            replace(self.settings, seed=settings.seed),
            document_range=source.documents,
            num_samples=num_samples,
            cache_dir=settings.cache_dir,
            name=name,
        )

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of blocks of a source; its index is built for that."""
        return len(self.build(source, None, settings, name="epoch"))


@dataclass(frozen=True)
class IctCollation:
    """Collation of `ICTSample`; for the tensors see `Biencoder.loss`.

    Attributes:
        vocab_size: Number of ids that a token may have.
    """

    vocab_size: int

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """Return the batch of *samples*; see `Collation`."""
        found: Sequence[ICTSample] = samples
        batch = {
            "query_BS": np.stack([sample.query_tokens_S for sample in found]),
            "query_padding_BS": np.stack([sample.query_mask_S for sample in found]) == 0,
            "block_BS": np.stack([sample.block_tokens_S for sample in found]),
            "block_padding_BS": np.stack([sample.block_mask_S for sample in found]) == 0,
            "query_weight_B": np.ones(len(found), dtype=np.float32),
        }
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        for name in ("query_BS", "block_BS"):
            check_vocabulary(tensors[name], self.vocab_size, first)
        return tensors
