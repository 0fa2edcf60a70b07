"""Samples of BERT: pairs of segments with masked words, and how they become a micro-batch.

Shapes: B micro-batch, S sequence, M most predicted tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import ConfigError
from lmcore.data.dataset.bert import BertDataset, BertSettings
from lmcore.data.dataset.masking import MaskingPolicy, MaskingVocabulary
from lmcore.data.tokenizer import special_ids, spellings
from lmcore.families.sample_format import SampleFormat
from lmcore.families.sentences import refuse_named_texts, require_sentences

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.dataset.bert import BertSample
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["BertCollation", "BertSamples", "masking_vocabulary", "samples", "second_type"]

_CONTINUES = "##"


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The tokenizer lacks a special token, or the run has no sentences to read.
    """
    refuse_named_texts(plan, "BERT")
    bert = plan.config.bert
    settings = BertSettings(
        sequence_length=plan.config.model.seq_length,
        seed=0,  # each source's, see `BertSamples`
        binary_head=bert.bert_binary_head,
        short_probability=bert.short_seq_prob,
        policy=MaskingPolicy(probability=bert.mask_prob),
    )
    builder = BertSamples(settings, masking_vocabulary(tokenizer))
    collation = BertCollation(
        settings.most_predictions, bert.bert_binary_head, second_type(bert.bert_token_types)
    )
    return SampleFormat(builder, collation, sentences=True)


def second_type(token_types: int) -> int:
    """Return the segment of the second text; the first one's if only that has an embedding."""
    return min(1, max(token_types - 1, 0))


def masking_vocabulary(tokenizer: Tokenizer) -> MaskingVocabulary:
    """Return what masking needs to know of a tokenizer's vocabulary.

    Raises:
        ConfigError: The tokenizer lacks a special token, or the spelling of its ids.
    """
    special = special_ids(tokenizer)
    needed = {"[CLS]": special.cls, "[SEP]": special.sep, "[MASK]": special.mask}
    missing = [f"`{token}`" for token, found in needed.items() if found is None]
    if missing or special.cls is None or special.sep is None or special.mask is None:
        raise ConfigError(
            f"BERT cannot be trained with the tokenizer `{tokenizer.name}`",
            why=f"its vocabulary has no {', no '.join(missing)}",
            hint="use data that was prepared with `--tokenizer-type BertWordPieceLowerCase "
            "--vocab-file FILE`",
        )
    continues = np.array([piece.startswith(_CONTINUES) for piece in spellings(tokenizer)])
    pad = 0 if special.pad is None else special.pad
    return MaskingVocabulary(
        cls=special.cls, sep=special.sep, continues=continues, mask=special.mask, pad=pad
    )


@dataclass(frozen=True)
class BertSamples:
    """Builder of BERT's samples; see `SampleBuilder`.

    Attributes:
        settings: Settings of the samples, without the seed.
        words: Vocabulary.
    """

    settings: BertSettings
    words: MaskingVocabulary

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> BertDataset:
        """Return the `BertDataset` of a source."""
        if self.settings.binary_head:
            other = ", or train without the head for the sentences' order: `--no-bert-binary-head`"
            require_sentences(source, "BERT", hint=other)
        return BertDataset(
            source.indexed,
            self.words,
            replace(self.settings, seed=settings.seed),
            document_range=source.documents,
            num_samples=num_samples,
            cache_dir=settings.cache_dir,
            name=name,
        )

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of samples of one pass over a source; its index is built for that."""
        return len(self.build(source, None, settings, name="epoch"))


@dataclass(frozen=True)
class BertCollation:
    """Collation of `BertSample`; for the tensors see `Bert.loss`.

    Attributes:
        most_predictions: M.
        binary_head: True for a model that finds swapped segments.
        second_type: Segment of the second text; see `second_type`.
    """

    most_predictions: int
    binary_head: bool
    second_type: int = 1

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:  # noqa: ARG002 - a protocol
        """Return the batch of *samples*; see `Collation`."""
        found: Sequence[BertSample] = samples
        size = (len(found), self.most_predictions)
        chosen, targets = np.zeros((2, *size), dtype=np.int64)
        weights = np.zeros(size, dtype=np.float32)
        for row, sample in enumerate(found):
            positions = np.flatnonzero(sample.loss_mask_S)
            end = len(positions)
            chosen[row, :end] = positions
            targets[row, :end] = sample.labels_S[positions]
            weights[row, :end] = 1.0
        batch = {
            "tokens_BS": np.stack([sample.tokens_S for sample in found]),
            "types_BS": np.stack([sample.types_S for sample in found]) * self.second_type,
            "padding_BS": np.stack([sample.padding_mask_S for sample in found]) == 0,
            "chosen_BM": chosen,
            "targets_BM": targets,
            "loss_weight_BM": weights,
        }
        if self.binary_head:
            batch["order_B"] = np.array([sample.swapped for sample in found], dtype=np.int64)
            batch["order_weight_B"] = np.ones(len(found), dtype=np.float32)
        return {name: torch.from_numpy(values) for name, values in batch.items()}
