"""The data sets of a run: opened, divided into parts, and made into samples by their weights.

`lmcore.config.data_source` says which there are; here they become documents, then samples.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lmcore.config.data_source import Blend, DataSource, Part, RunSources
from lmcore.data.blend.dataset import BlendedDataset, ShortSourceError, SourceStream
from lmcore.data.blend.file_list import scan_data_file_list
from lmcore.data.blend.index import build_exhaustive_index, normalize, source_sizes
from lmcore.data.blend.index_cache import blend_index
from lmcore.data.blend.train_split import split_ranges
from lmcore.data.cache.index_cache import index_cache_dir
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.errors import ConfigError, DataError, LmcoreError, counted

__all__ = [
    "OpenSource",
    "SampleSettings",
    "TrainingSamples",
    "build_samples",
    "build_stream",
    "expand_file_lists",
    "expand_what_can_be",
    "open_sources",
    "weigh",
]

logger = logging.getLogger(__name__)

TrainingSamples = GPTDataset | BlendedDataset
"""The samples of a part: of one source, or a blend."""

_LONG_NAME = {"train": "training", "valid": "validation", "test": "test"}


@dataclass(frozen=True)
class OpenSource:
    """A source's documents for one part.

    Attributes:
        name: As the user named it.
        indexed: The data set.
        documents: First document of the part, and the one after the last.
        weight: Its share of the samples, not normalized; None: in proportion to its size.
    """

    name: str
    indexed: IndexedDataset
    documents: tuple[int, int]
    weight: float | None = None


@dataclass(frozen=True)
class SampleSettings:
    """What all samples of a run have in common; see `GPTDataset`."""

    sequence_length: int
    seed: int
    cache_dir: str | Path | None
    final_epoch_threshold: float


def expand_file_lists(sources: RunSources) -> RunSources:
    """Return the sources with those of data file lists in place of the lists.

    Raises:
        DataError: A list cannot be read.
        ConfigError: Lines that are none, data sets that are named twice or not there; all of them.
    """
    found, problems = expand_what_can_be(sources)
    if problems:
        raise ConfigError.collect(problems)
    return found


def expand_what_can_be(sources: RunSources) -> tuple[RunSources, list[LmcoreError]]:
    """Do what `expand_file_lists` does, and return what is wrong with the lists.

    Raises:
        DataError: A list cannot be read.
    """
    if sources.divided is None or sources.divided.file_list is None:
        return sources, []
    path = sources.divided.file_list
    files, problems = scan_data_file_list(path)
    names = [one.path for one in files]
    twice = [name for name, count in Counter(names).items() if count > 1]
    problems += [
        ConfigError(
            f"`--data-file-list {path}` names `{name}` twice",
            why="the same samples would come once for each time, in the same order",
            hint="name it once, with a larger weight",
        )
        for name in twice
    ]
    lost = [
        f"`{name}{missing[0]}`"
        for name in dict.fromkeys(names)
        if (missing := [end for end in (".idx", ".bin") if not Path(f"{name}{end}").is_file()])
    ]
    if lost:
        problem = ConfigError(
            f"`--data-file-list {path}`: {len(lost)} of {counted(len(files), 'data set')} "
            f"{'is' if len(lost) == 1 else 'are'} not there",
            why=f"no file {', '.join(lost[:5])}{', ...' * (len(lost) > 5)}",
            hint="where data has moved, `lmcore data weights` writes the list anew",
        )
        problems.append(problem)
    named = tuple(DataSource(one.path, one.weight) for one in files)
    return replace(sources, divided=replace(sources.divided, sources=named)), problems


def open_sources(
    sources: RunSources,
    split: str,
    *,
    needed: Iterable[Part],
    prefix_of: Callable[[DataSource], str],
) -> dict[Part, tuple[OpenSource, ...]]:
    """Open every data set once, and return the documents that each part has of it.

    Args:
        sources: Which there are; without file lists.
        split: Divides those that have no range of their own.
        needed: Parts that must not be empty.
        prefix_of: Gives the prefix of a source, which may have to be prepared for that.

    Raises:
        DataError: A data set is damaged, or a part that is needed gets no document.
    """
    opened: dict[str, IndexedDataset] = {}

    def open_one(source: DataSource) -> IndexedDataset:
        if source.name not in opened:
            opened[source.name] = IndexedDataset(prefix_of(source))
        return opened[source.name]

    if sources.divided is not None:
        return _divided(sources.divided, split, tuple(needed), open_one)
    parts: dict[Part, tuple[OpenSource, ...]] = {}
    for part, blend in sources.own.items():
        found = []
        for one in blend.sources:
            indexed = open_one(one)
            documents = _documents(indexed.document_count, one.documents)
            found.append(OpenSource(one.name, indexed, documents, one.weight))
        parts[part] = _not_empty(found, part, blend.flag)
    return parts


def _divided(
    blend: Blend,
    split: str,
    needed: tuple[Part, ...],
    open_one: Callable[[DataSource], IndexedDataset],
) -> dict[Part, tuple[OpenSource, ...]]:
    sets = [(one, open_one(one)) for one in blend.sources]
    if len(sets) == 1:
        one, indexed = sets[0]
        ranges = split_ranges(indexed.document_count, split, needed=needed)
        return {
            part: (OpenSource(one.name, indexed, documents, one.weight),)
            for part, documents in ranges.items()
            if documents[0] < documents[1]
        }
    parts: dict[Part, list[OpenSource]] = {"train": [], "valid": [], "test": []}
    for one, indexed in sets:
        ranges = split_ranges(indexed.document_count, split, needed=())
        for part, documents in ranges.items():
            parts[part].append(OpenSource(one.name, indexed, documents, one.weight))
    kept: dict[Part, tuple[OpenSource, ...]] = {}
    for part, found in parts.items():
        if part in needed or any(one.documents[0] < one.documents[1] for one in found):
            kept[part] = _not_empty(found, part, f"--split {split}")
    return kept


def _not_empty(found: Sequence[OpenSource], part: Part, option: str) -> tuple[OpenSource, ...]:
    """Return the sources that have documents; say which have none."""
    kept = tuple(one for one in found if one.documents[0] < one.documents[1])
    empty = [one for one in found if one not in kept]
    word = _LONG_NAME[part]
    if not kept:
        raise DataError(
            f"`{option}` leaves no {word} documents",
            why="; ".join(f"`{one.name}` has {one.indexed.document_count}" for one in found[:5]),
            hint="give more data, or this part a larger share",
        )
    if empty:
        logger.warning(
            "`%s` leaves no %s documents of %s, which the %s data goes without",
            option,
            word,
            ", ".join(
                f"`{one.name}` ({counted(one.indexed.document_count, 'document')})" for one in empty
            ),
            word,
        )
    return kept


def _documents(count: int, share: tuple[float, float] | None) -> tuple[int, int]:
    """Return first and end document of a share of them, each bound rounded as upstream does."""
    start, end = share or (0.0, 1.0)
    return round(start * count), round(end * count)


def build_samples(
    sources: Sequence[OpenSource],
    num_samples: int,
    settings: SampleSettings,
    *,
    name: str,
    one_pass: bool = False,
) -> TrainingSamples:
    """Return *num_samples* samples or a few more, of one source or blended.

    As upstream: with weights, each source is read as often as its weight asks for; without, in
    proportion to what it has, each sample once.  Where that is not enough, ours goes on with
    further epochs in the same proportion, and upstream's run ends with an error.

    Args:
        sources: At least one.
        num_samples: How many are wanted.
        settings: Of all samples.
        name: Of the part, for the caches' names.
        one_pass: Return one pass over what sources without weights have, whatever is wanted.

    Raises:
        DataError: See `GPTDataset`; or there is not one sample in all sources together.
    """
    if len(sources) == 1 and sources[0].weight is None:
        return _gpt_dataset(sources[0], None if one_pass else num_samples, settings, name)
    kept, weights = weigh(sources, settings.sequence_length)
    if kept[0].weight is not None:
        return _weighted(kept, weights, num_samples, settings, name)
    total = sum(_length(one, settings.sequence_length) for one in kept)
    if not one_pass and num_samples > total:
        return _weighted(kept, weights, num_samples, settings, name)
    streams = [build_stream(one, [None], settings, name) for one in kept]
    return _exhaustive(streams, weights, total if one_pass else num_samples)


def weigh(
    sources: Sequence[OpenSource], sequence_length: int
) -> tuple[list[OpenSource], list[float]]:
    """Return the sources of a blend and their normalized weights.

    Those without weights go by the samples that they hold; one that holds none is left out.

    Raises:
        DataError: None of them holds a sample.
    """
    if sources[0].weight is not None:
        return list(sources), normalize([one.weight or 0.0 for one in sources])
    lengths = [_length(one, sequence_length) for one in sources]
    kept = [one for one, length in zip(sources, lengths, strict=True) if length]
    small = ", ".join(f"`{one.name}`" for one in sources if one not in kept)
    if not kept:
        raise DataError(
            f"no source holds one sample of {sequence_length + 1} tokens",
            why=small,
            hint="give more data, a smaller `--seq-length`, or a weight for each source",
        )
    if small:
        logger.warning(
            "%s: less than one sample of %d tokens, left out of a blend by size",
            small,
            sequence_length + 1,
        )
    return kept, normalize([length for length in lengths if length])


def build_stream(
    source: OpenSource, requested: Sequence[int | None], settings: SampleSettings, name: str
) -> SourceStream:
    """Return a source's samples: an index for each number of *requested*, one after another.

    The first index is shuffled by the run's seed, each further one by the seed after it.  None
    asks for one epoch.

    Raises:
        DataError: See `GPTDataset`.
    """
    parts = [
        _gpt_dataset(source, count, replace(settings, seed=settings.seed + number), name)
        for number, count in enumerate(requested)
    ]
    return SourceStream(source.name, parts[0].key, parts, [len(part) for part in parts])


def _weighted(
    sources: Sequence[OpenSource],
    weights: Sequence[float],
    num_samples: int,
    settings: SampleSettings,
    name: str,
) -> BlendedDataset:
    size, wanted = source_sizes(weights, num_samples)
    streams = [
        build_stream(source, [count], settings, name)
        for source, count in zip(sources, wanted, strict=True)
    ]
    index = blend_index(
        weights, size, index_cache_dir(sources[0].indexed, settings.cache_dir), name
    )
    try:
        return BlendedDataset(streams, weights, size, index=index)
    except ShortSourceError as short:
        # The greedy rule took more of a source than the surplus; upstream stops here.
        more = [max(pair) for pair in zip(wanted, short.needed, strict=True)]
        streams = [
            build_stream(source, [count], settings, name) if count > stream.available else stream
            for source, stream, count in zip(sources, streams, more, strict=True)
        ]
        return BlendedDataset(streams, weights, size, index=index)


def _exhaustive(
    streams: Sequence[SourceStream], weights: Sequence[float], size: int
) -> BlendedDataset:
    """Return a blend in which no sample of a source comes twice."""
    try:
        return BlendedDataset(streams, weights, size)
    except ShortSourceError:
        index = build_exhaustive_index([stream.available for stream in streams])
        return BlendedDataset(streams, weights, size, index=(index[0][:size], index[1][:size]))


def _length(source: OpenSource, sequence_length: int) -> int:
    """Return how many samples one epoch of a source holds."""
    first, last = source.indexed.sequence_range(source.documents)
    tokens = int(source.indexed.sizes[first:last].sum(dtype=np.int64))
    return max(tokens - 1, 0) // sequence_length


def _gpt_dataset(
    source: OpenSource, num_samples: int | None, settings: SampleSettings, name: str
) -> GPTDataset:
    return GPTDataset(
        source.indexed,
        document_range=source.documents,
        num_samples=num_samples,
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        cache_dir=settings.cache_dir,
        name=name,
        final_epoch_threshold=settings.final_epoch_threshold,
    )
