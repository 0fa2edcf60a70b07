"""Data sources of a run: opened, divided into parts, and made into samples by their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from lmcore.base.errors import DataError, counted
from lmcore.base.log import ALL_RANKS
from lmcore.config.derived.data_source import PARTS, Blend, DataSource, Part, RunSources
from lmcore.config.derived.split import DataSplit
from lmcore.config.section.data import BLEND_RULES, SPLIT_RULES
from lmcore.data.blend.dataset import (
    BlendedDataset,
    ShortSourceError,
    SourceSamples,
    SourceStream,
)
from lmcore.data.blend.index import BlendWeights, build_exhaustive_index, source_sizes
from lmcore.data.blend.index_cache import blend_index
from lmcore.data.blend.train_split import LONG_NAME, more_documents, split_ranges
from lmcore.data.cache.index_cache import index_cache_dir
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import verify_files

__all__ = [
    "GPTSamples",
    "OpenSource",
    "SampleBuilder",
    "SampleSettings",
    "TrainingSamples",
    "build_samples",
    "build_stream",
    "open_sources",
    "weigh_sources",
]

logger = logging.getLogger(__name__)

TrainingSamples = SourceSamples | BlendedDataset
"""Samples of a part: of one source, or a blend."""


@dataclass(frozen=True)
class OpenSource:
    """Documents of a source that belong to one part.

    Attributes:
        name: The user's name of the source.
        indexed: The dataset.
        documents: First document of the part, and the one after the last.
        weight: Share of the samples, not normalized; None: in proportion to its size.
    """

    name: str
    indexed: IndexedDataset
    documents: tuple[int, int]
    weight: float | None = None


class SampleBuilder(Protocol):
    """Builder of the samples of one kind, which a model family takes."""

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> SourceSamples:
        """Return the samples of a source, in the order of training.

        Args:
            source: The source.
            num_samples: Number of samples wanted; None for one epoch.
            settings: Settings of all samples.
            name: Name of the part, for the cache's file names.

        Raises:
            DataError: The documents make no sample.
        """

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of samples in one epoch of a source, without building them."""


class GPTSamples:
    """Builder of GPT samples; see `SampleBuilder`."""

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> GPTDataset:
        """Return the `GPTDataset` of a source; refuse one that is split into sentences."""
        _refuse_sentences(source)
        return GPTDataset(
            source.indexed,
            document_range=source.documents,
            num_samples=num_samples,
            name=name,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            cache_dir=settings.cache_dir,
            final_epoch_threshold=settings.final_epoch_threshold,
        )

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of whole sequences in the tokens of a source."""
        _refuse_sentences(source)
        first, last = source.indexed.sequence_range(source.documents)
        tokens = int(source.indexed.sizes[first:last].sum(dtype=np.int64))
        return max(tokens - 1, 0) // settings.sequence_length


def _refuse_sentences(source: OpenSource) -> None:
    """Refuse a dataset of sentences, which GPT samples would join in a random order."""
    indexed = source.indexed
    documents, sequences = indexed.document_count, len(indexed)
    stored = "" if indexed.modes is not None or sequences == documents else f"{sequences:,}"
    if not stored and not Path(indexed.prefix).name.endswith("_sentence"):
        return
    why = "its name ends with `_sentence`"
    if stored:
        why = f"its {counted(documents, 'document')} are stored as {stored} sentences"
    raise DataError(
        f"`{source.name}` is split into sentences, and the model of the run is a decoder",
        why=f"{why}; a decoder would read them in a random order: such data is for BERT",
        hint="add `--model-family bert`, or `ict` or `t5`; to train GPT or Llama, prepare the text "
        "again without `--split-sentences`",
    )


@dataclass(frozen=True)
class SampleSettings:
    """Settings that are the same for all samples of a run.

    Attributes:
        sequence_length: Tokens of a sample.
        seed: Seed of the shuffles.
        cache_dir: Directory of the indices; None for a directory beside the data.
        final_epoch_threshold: See `build_gpt_index`.
        builder: Builder of the samples.
        blend_rule: Value of `--blend-rule`.
    """

    sequence_length: int
    seed: int
    cache_dir: str | Path | None
    final_epoch_threshold: float
    builder: SampleBuilder = field(default_factory=GPTSamples)
    blend_rule: str = BLEND_RULES[0]


def open_sources(
    sources: RunSources,
    *,
    needed: Iterable[Part],
    prefix_of: Callable[[DataSource], str],
    split_rule: str = SPLIT_RULES[0],
    blend_rule: str = BLEND_RULES[0],
    verify_indices: bool = False,
) -> dict[Part, tuple[OpenSource, ...]]:
    """Open every dataset once, and return its documents for each part.

    The weight of a single dataset of one part's own is dropped, as in megatron-core: the part is no
    blend, whose sources have 0.5% more samples than needed.

    Args:
        sources: Data sources of the run, without file lists.
        needed: Parts that must not be empty.
        prefix_of: Function that returns the prefix of a source, and may prepare it first.
        split_rule: Value of `--split-rule`.
        blend_rule: Value of `--blend-rule`; lmcore 2026.11 kept the weight of a single dataset.
        verify_indices: True to verify every block of the datasets' cached indices.

    Raises:
        DataError: A dataset is damaged, or a needed part has no documents.
    """
    opened: dict[str, IndexedDataset] = {}

    def open_one(source: DataSource) -> IndexedDataset:
        if source.name not in opened:
            prefix = prefix_of(source)
            opened[source.name] = IndexedDataset(prefix, verify_indices=verify_indices)
            verify_files(prefix)
        return opened[source.name]

    if sources.divided is not None:
        assert sources.split is not None, "the rules refuse a malformed split"
        return _divide(sources.divided, sources.split, split_rule, tuple(needed), open_one)
    parts: dict[Part, tuple[OpenSource, ...]] = {}
    for part, blend in sources.own.items():
        found = []
        alone = len(blend.sources) == 1 and blend_rule == "megatron-core"
        for source in blend.sources:
            indexed = open_one(source)
            start, end = source.documents or (0.0, 1.0)
            count = indexed.document_count
            documents = round(start * count), round(end * count)  # rounded as in Megatron
            weight = None if alone else source.weight
            found.append(OpenSource(source.name, indexed, documents, weight))
        parts[part] = _drop_empty(found, part, blend.flag, num_parts=1)
    return parts


def _divide(
    blend: Blend,
    split: DataSplit,
    split_rule: str,
    needed: tuple[Part, ...],
    open_one: Callable[[DataSource], IndexedDataset],
) -> dict[Part, tuple[OpenSource, ...]]:
    parts: dict[Part, list[OpenSource]] = {part: [] for part in PARTS}
    only_source = len(blend.sources) == 1
    for source in blend.sources:
        indexed = open_one(source)
        ranges = split_ranges(
            indexed.document_count,
            split,
            needed=needed if only_source else (),
            rule=split_rule,
        )
        for part, documents in ranges.items():
            parts[part].append(OpenSource(source.name, indexed, documents, source.weight))
    return {
        part: _drop_empty(found, part, f"--split {split.text}", num_parts=len(needed))
        for part, found in parts.items()
        if part in needed or any(source.documents[0] < source.documents[1] for source in found)
    }


def _drop_empty(
    found: Sequence[OpenSource], part: Part, option: str, *, num_parts: int
) -> tuple[OpenSource, ...]:
    """Return the sources that have documents; warn of empty ones.

    Args:
        found: Sources of the part.
        part: The part.
        option: Option that gives the documents of the part, for messages.
        num_parts: Number of parts that share the documents of a source.

    Raises:
        DataError: No source has documents.
    """
    kept = tuple(source for source in found if source.documents[0] < source.documents[1])
    if not kept:
        raise DataError(
            f"`{option}` leaves no {LONG_NAME[part]} documents",
            why="; ".join(f"`{one.name}` has {one.indexed.document_count}" for one in found[:5]),
            hint=more_documents(max(one.indexed.document_count for one in found), num_parts),
        )
    empty = [
        f"`{source.name}` ({counted(source.indexed.document_count, 'document')})"
        for source in found
        if source not in kept
    ]
    if empty:
        logger.warning(
            "`%s` leaves no %s documents of %s: left out of the %s data",
            option,
            LONG_NAME[part],
            ", ".join(empty),
            LONG_NAME[part],
            extra=ALL_RANKS,
        )
    return kept


def build_samples(
    sources: Sequence[OpenSource],
    num_samples: int,
    settings: SampleSettings,
    *,
    name: str,
    one_pass: bool = False,
) -> TrainingSamples:
    """Return at least *num_samples* samples, of one source or a blend.

    With weights, sources repeat as often as their weight requires.  Without weights, each sample of
    every source is used once, in proportion to their sizes; if more samples are needed, further
    epochs follow in the same proportion.

    Args:
        sources: Sources of the part, at least one.
        num_samples: Number of samples wanted.
        settings: Settings of all samples.
        name: Name of the part, for the cache's file names.
        one_pass: True for one pass over sources without weights, whatever *num_samples* is.

    Raises:
        DataError: See `SampleBuilder.build`; or the sources have no sample.

    Source:
        Megatron-LM, `BlendedMegatronDatasetBuilder`.  Without weights, Megatron's run stops with an
        error if the sources have too few samples.
    """
    if len(sources) == 1 and sources[0].weight is None:
        count = None if one_pass else num_samples
        return settings.builder.build(sources[0], count, settings, name=name)
    kept, weights = weigh_sources(sources, settings)
    if kept[0].weight is not None:
        return _build_weighted(kept, weights, num_samples, settings, name)
    total = sum(settings.builder.samples_per_epoch(source, settings) for source in kept)
    if not one_pass and num_samples > total:
        return _build_weighted(kept, weights, num_samples, settings, name)
    streams = [build_stream(source, [None], settings, name) for source in kept]
    size = total if one_pass else num_samples
    try:
        return BlendedDataset(streams, weights.order, size)
    except ShortSourceError:  # the greedy rule would repeat samples of a source
        dataset, sample = build_exhaustive_index([stream.available for stream in streams])
        return BlendedDataset(streams, weights.order, size, index=(dataset[:size], sample[:size]))


def weigh_sources(
    sources: Sequence[OpenSource], settings: SampleSettings
) -> tuple[list[OpenSource], BlendWeights]:
    """Return the sources of a blend and their weights.

    Sources without weights are weighted by the samples of an epoch; a source with less than one
    sample is left out, with a warning.

    Args:
        sources: Sources of a part, all with weights or all without.
        settings: Settings of all samples.

    Raises:
        DataError: No source has a sample.
    """
    if sources[0].weight is not None:
        weights = [source.weight or 0.0 for source in sources]
        return list(sources), BlendWeights.given(weights, settings.blend_rule)
    lengths = [settings.builder.samples_per_epoch(source, settings) for source in sources]
    kept = [source for source, length in zip(sources, lengths, strict=True) if length]
    small = ", ".join(f"`{source.name}`" for source in sources if source not in kept)
    if not kept:
        raise DataError(
            f"no source has a sample of {settings.sequence_length + 1} tokens",
            why=small,
            hint="give more data, a smaller `--seq-length`, or a weight for each source",
        )
    if small:
        logger.warning(
            "%s: less than one sample of %d tokens, left out of a blend by size",
            small,
            settings.sequence_length + 1,
            extra=ALL_RANKS,
        )
    return kept, BlendWeights.by_size([length for length in lengths if length])


def build_stream(
    source: OpenSource, requested: Sequence[int | None], settings: SampleSettings, name: str
) -> SourceStream:
    """Return a source's samples: one index after another.

    Args:
        source: The source.
        requested: Number of samples of each index; None for one epoch.
        settings: Settings of all samples.  Their seed is the first index's; each further index
            uses the next seed.
        name: Name of the part, for the cache's file names.

    Raises:
        DataError: See `SampleBuilder.build`.
    """
    parts = [
        settings.builder.build(
            source, count, replace(settings, seed=settings.seed + number), name=name
        )
        for number, count in enumerate(requested)
    ]
    return SourceStream(source.name, parts[0].key, parts, [len(part) for part in parts])


def _build_weighted(
    sources: Sequence[OpenSource],
    weights: BlendWeights,
    num_samples: int,
    settings: SampleSettings,
    name: str,
) -> BlendedDataset:
    size, wanted = source_sizes(weights.sizes, num_samples)
    streams = [
        build_stream(source, [count], settings, name)
        for source, count in zip(sources, wanted, strict=True)
    ]
    directory = index_cache_dir(sources[0].indexed, settings.cache_dir)
    every = sources[0].indexed.verify_indices
    index = blend_index(weights.order, size, directory, name, verify=every)
    try:
        return BlendedDataset(streams, weights.order, size, index=index)
    except ShortSourceError as short:
        # The greedy rule took more of a source than the 0.5% surplus; Megatron stops here.
        more = [max(pair) for pair in zip(wanted, short.needed, strict=True)]
        streams = [
            build_stream(source, [count], settings, name) if count > stream.available else stream
            for source, stream, count in zip(sources, streams, more, strict=True)
        ]
        return BlendedDataset(streams, weights.order, size, index=index)
