"""`Order`: the training samples of a run in their order, which a checkpoint records.

A run that resumes continues in the order of the checkpoint's run, or with new sources and weights
(`--change-blend`), each source from its next sample.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.data.blend.cyclic_sampler import CyclicDataset
from lmcore.data.blend.dataset import BlendedDataset, BlendRecord, SourceRecord, SourceStream
from lmcore.data.blend.index import BlendWeights, source_sizes
from lmcore.data.blend.index_cache import blend_index
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    TrainingSamples,
    build_samples,
    build_stream,
    weigh_sources,
)
from lmcore.data.cache.index_cache import index_cache_dir
from lmcore.data.indexed.statistics import content_fingerprint

__all__ = ["Order", "OrderRecord"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrderRecord:
    """The order of a checkpoint's run, and how far the run had come.

    Attributes:
        fingerprint: Fingerprint of the order (`Order.fingerprint`).
        position: Number of samples that the run had consumed, over all ranks.
        blend: Record of the sources; None for a cyclic order and in old checkpoints.
        same_rules: True if this run orders samples by the same rules (`--split-rule`,
            `--blend-rule`).
    """

    fingerprint: str
    position: int
    blend: BlendRecord | None
    same_rules: bool = True


@dataclass(frozen=True)
class Order:
    """Training samples of a run in their order, from `begin` or `continue_from`.

    Attributes:
        samples: The samples, by their position in the run.
        name: The user's name of the first source.
        continued: Fingerprint of the checkpoint's order, if the samples of a longer run continue
            it; None otherwise.
    """

    samples: TrainingSamples | CyclicDataset
    name: str
    continued: str | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the samples in their order."""
        return self.samples.order

    @property
    def resumed(self) -> str:
        """Fingerprint to compare with the checkpoint's: its own if the samples continue it."""
        return self.continued or self.fingerprint

    @classmethod
    def begin(
        cls,
        sources: Sequence[OpenSource],
        length: int,
        settings: SampleSettings,
        *,
        cyclic: bool = False,
    ) -> Order:
        """Return the order of a new run.

        Args:
            sources: Training sources.
            length: Number of training samples of the whole run.
            settings: Settings of all samples.
            cyclic: True for passes over all samples, each in its own random order.

        Raises:
            DataError: See `build_samples`.
        """
        samples: TrainingSamples | CyclicDataset
        samples = build_samples(sources, length, settings, name="train", one_pass=cyclic)
        if cyclic:
            samples = CyclicDataset(samples, length)
        return cls(samples, sources[0].name)

    @classmethod
    def continue_from(
        cls,
        record: OrderRecord,
        length: int,
        sources: Sequence[OpenSource],
        settings: SampleSettings,
        *,
        change_blend: bool = False,
    ) -> Order:
        """Return the order of a run that resumes.

        If more than the length differs, and *change_blend* is False, the fingerprint is not the
        record's.

        Args:
            record: Record of the checkpoint.
            length: Number of training samples of the whole run.
            sources: Training sources.
            settings: Settings of all samples.
            change_blend: True if sources and weights may differ from the record's.  A source that
                the run has used before continues with its next sample; when its index ends, a
                further index with another seed follows.

        Raises:
            ConfigError: Sources or weights differ from the record, or with *change_blend* the data
                of a source.
            DataError: See `build_samples`.
        """
        blend, name = record.blend, sources[0].name
        if blend is None:
            return cls.begin(sources, length, settings)
        try:
            same = _as_recorded(sources, blend, length, settings)
        except ConfigError:
            if not change_blend:
                raise
        else:
            if same.order == record.fingerprint:
                return cls(same, name)
            if not change_blend:
                longer = _longer(sources, record, blend, length, settings)
                return cls(same, name) if longer is None else cls(longer, name, record.fingerprint)
        logger.info(
            "after %d samples, each data source continues at its position in the checkpoint",
            record.position,
        )
        return cls(_changed(sources, blend, record.position, length, settings), name)

    def record(self, position: int) -> dict[str, Any] | None:
        """Return the record of the sources for a checkpoint; None for a cyclic order.

        Args:
            position: Number of samples that the run has consumed, over all ranks.
        """
        samples = self.samples
        if isinstance(samples, CyclicDataset):
            return None
        if isinstance(samples, BlendedDataset):
            return samples.record(position).to_dict()
        requested = (len(samples),)
        source = SourceRecord(self.name, samples.key, samples.order, requested, consumed=position)
        return BlendRecord(0, (1.0,), (source,)).to_dict()


def _as_recorded(
    sources: Sequence[OpenSource], record: BlendRecord, length: int, settings: SampleSettings
) -> TrainingSamples:
    """Return the samples of a record's run; if its blend began in the middle, so do they.

    Raises:
        ConfigError: Sources or weights differ from a record that begins in the middle of a run.
    """
    if not record.start:
        return build_samples(sources, length, settings, name="train")
    sources, weights = weigh_sources(sources, settings)
    known, known_weights = _weighted(record)
    if not _is_same(sources, weights, record):
        raise ConfigError(
            "sources or weights differ from the checkpoint's",
            why=f"checkpoint: {_show([source.name for source in known], known_weights)}; "
            f"this run: {_show([source.name for source in sources], weights.order)}, by "
            f"`--blend-rule {settings.blend_rule}`",
            hint="`--change-blend` continues with the new ones, each source from its next sample",
        )
    taken = [source.taken for source in known]
    return _blend(sources, weights, record, length, settings, start=record.start, taken=taken)


def _longer(
    sources: Sequence[OpenSource],
    record: OrderRecord,
    blend: BlendRecord,
    length: int,
    settings: SampleSettings,
) -> TrainingSamples | None:
    """Return the samples of a run whose length alone differs; None if more differs.

    More epochs shuffled together would be in another order; the run continues in its own instead.
    """
    if not record.same_rules or not _is_same(*weigh_sources(sources, settings), blend):
        return None
    try:
        longer = _changed(sources, blend, record.position, length, settings)
    except ConfigError:
        return None
    logger.info(
        "the run has another number of epochs: the order of its first %d samples is kept, and "
        "each data source continues from there",
        record.position,
    )
    return longer


def _changed(
    sources: Sequence[OpenSource],
    record: BlendRecord,
    position: int,
    length: int,
    settings: SampleSettings,
) -> BlendedDataset:
    """Return a blend of new sources or weights that begins at *position*."""
    sources, weights = weigh_sources(sources, settings)
    taken = [known.consumed if (known := _known(one, record)) else 0 for one in sources]
    return _blend(sources, weights, record, length, settings, start=position, taken=taken)


def _weighted(record: BlendRecord) -> tuple[list[SourceRecord], list[float]]:
    """Return the sources of a record with a weight above 0, and their weights."""
    pairs = [
        (source, weight)
        for source, weight in zip(record.sources, record.weights, strict=True)
        if weight > 0
    ]
    return [source for source, _ in pairs], [weight for _, weight in pairs]


def _is_same(sources: Sequence[OpenSource], weights: BlendWeights, record: BlendRecord) -> bool:
    """Return True if weighed sources and their weights equal a record's."""
    known, known_weights = _weighted(record)
    same_sources = [_key(source) for source in sources] == [source.key for source in known]
    return same_sources and weights.order == known_weights


def _blend(
    sources: Sequence[OpenSource],
    weights: BlendWeights,
    record: BlendRecord,
    num_samples: int,
    settings: SampleSettings,
    *,
    start: int,
    taken: Sequence[int],
) -> BlendedDataset:
    size, wanted = source_sizes(weights.sizes, max(num_samples - start, 1))
    streams = [
        _stream(source, _known(source, record), base + count, settings)
        for source, base, count in zip(sources, taken, wanted, strict=True)
    ]
    keys = {stream.key for stream in streams}
    retired = [source for source in record.sources if source.key not in keys]
    directory = index_cache_dir(sources[0].indexed, settings.cache_dir)
    every = sources[0].indexed.verify_indices
    index = blend_index(weights.order, size, directory, "train", verify=every)
    return BlendedDataset(
        streams, weights.order, size, start=start, taken=taken, index=index, retired=retired
    )


def _stream(
    source: OpenSource, known: SourceRecord | None, needed: int, settings: SampleSettings
) -> SourceStream:
    """Return at least *needed* samples of a source, in the order of the checkpoint's run."""
    if known is None:
        return build_stream(source, [needed], settings, "train")
    stream = build_stream(source, known.requested, settings, "train")
    if stream.order != known.order:
        raise ConfigError(
            f"the samples of `{source.name}` are in another order than the checkpoint's",
            why="seed, sequence length or `--final-epoch-threshold` differ; samples would be "
            "repeated or skipped",
            hint="give the first run's settings; `--change-blend` changes sources and weights only",
        )
    if stream.available >= needed:
        return stream
    further = [*known.requested, needed - stream.available]
    return build_stream(source, further, settings, "train")


def _known(source: OpenSource, record: BlendRecord) -> SourceRecord | None:
    """Return the record of a source; None for a new source.

    Raises:
        ConfigError: The record has other documents under the source's name.
    """
    key = _key(source)
    same = [known for known in record.sources if known.key == key]
    if same:  # under another name if the data was moved
        return next((known for known in same if known.name == source.name), same[0])
    if any(known.name == source.name for known in record.sources):
        raise ConfigError(
            f"`{source.name}` has other documents than in the checkpoint's run",
            why="its data or `--split` has changed; samples would be repeated",
            hint="restore the data, or give the new data another name",
        )
    return None


def _key(source: OpenSource) -> str:
    return content_fingerprint(source.indexed, source.indexed.sequence_range(source.documents))


def _show(names: Sequence[str], weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g} `{name}`" for name, weight in zip(names, weights, strict=True))
