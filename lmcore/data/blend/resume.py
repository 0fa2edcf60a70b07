"""Blend of a resumed run: the same as before, or new sources and weights (`--change-blend`)."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.data.blend.dataset import BlendedDataset, BlendRecord, SourceRecord, SourceStream
from lmcore.data.blend.index import BlendWeights, source_sizes
from lmcore.data.blend.index_cache import blend_index
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    TrainingSamples,
    build_stream,
    weigh_sources,
)
from lmcore.data.cache.index_cache import index_cache_dir
from lmcore.data.indexed.statistics import content_fingerprint
from lmcore.errors import ConfigError

__all__ = ["blend_record", "changed_blend", "continued_blend", "extended_blend"]


def blend_record(samples: TrainingSamples, position: int, name: str) -> BlendRecord:
    """Return the record of the run's sources for a checkpoint at *position*.

    Args:
        samples: Training samples.
        position: Number of samples that the run has consumed, over all ranks.
        name: The user's name of the source, if *samples* has only one.
    """
    if isinstance(samples, BlendedDataset):
        return samples.record(position)
    source = SourceRecord(name, samples.key, samples.order, (len(samples),), consumed=position)
    return BlendRecord(0, (1.0,), (source,))


def continued_blend(
    sources: Sequence[OpenSource], record: BlendRecord, num_samples: int, settings: SampleSettings
) -> BlendedDataset:
    """Return the blend of a checkpoint's record, if that began in the middle of the run.

    Args:
        sources: Training sources.
        record: Record of the checkpoint, with a `start` above 0.
        num_samples: Number of training samples of the whole run.
        settings: Settings of all samples.

    Raises:
        ConfigError: Sources or weights differ from the record.
    """
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
    return _blend(
        sources,
        weights,
        record,
        num_samples,
        settings,
        start=record.start,
        taken=[source.taken for source in known],
    )


def changed_blend(
    sources: Sequence[OpenSource],
    record: BlendRecord,
    position: int,
    num_samples: int,
    settings: SampleSettings,
) -> BlendedDataset:
    """Return a blend of new sources or weights that begins at *position*.

    A source that the run has used before continues with its next sample.  When its index ends, a
    further index with another seed follows.

    Args:
        sources: Training sources, with their new weights.
        record: Record of the checkpoint.
        position: Number of samples that the run has consumed, over all ranks.
        num_samples: Number of training samples of the whole run.
        settings: Settings of all samples.

    Raises:
        ConfigError: The data of a source has changed since the checkpoint.
    """
    sources, weights = weigh_sources(sources, settings)
    taken = [known.consumed if (known := _known(one, record)) else 0 for one in sources]
    return _blend(sources, weights, record, num_samples, settings, start=position, taken=taken)


def extended_blend(
    sources: Sequence[OpenSource],
    record: BlendRecord,
    position: int,
    num_samples: int,
    settings: SampleSettings,
) -> BlendedDataset | None:
    """Return the blend of a run that is longer than the checkpoint's, with the same sources.

    From *position* each source continues with its next sample, as in `changed_blend`.  None if the
    sources, their weights or the order of their samples differ from the record.
    """
    if not _is_same(*weigh_sources(sources, settings), record):
        return None
    try:
        return changed_blend(sources, record, position, num_samples, settings)
    except ConfigError:
        return None


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
