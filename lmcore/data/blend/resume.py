"""A run's blend after an interruption: the same one, or new weights from where each source is."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.data.blend.dataset import BlendedDataset, BlendRecord, SourceRecord, SourceStream
from lmcore.data.blend.index import source_sizes
from lmcore.data.blend.index_cache import blend_index
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    TrainingSamples,
    build_stream,
    weigh,
)
from lmcore.data.cache.index_cache import index_cache_dir
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.fingerprint import content_fingerprint
from lmcore.errors import ConfigError

__all__ = ["blend_record", "changed_blend", "continued_blend"]


def blend_record(samples: TrainingSamples, position: int, name: str) -> BlendRecord:
    """Return what a checkpoint at *position* keeps of the run's sources.

    Args:
        samples: Training samples.
        position: Samples that the run has consumed.
        name: What the user calls the source, where there is one.
    """
    if isinstance(samples, BlendedDataset):
        return samples.record(position)
    assert isinstance(samples, GPTDataset)
    one = SourceRecord(
        name, samples.key, samples.order, (len(samples),), taken=0, consumed=position
    )
    return BlendRecord(0, (1.0,), (one,))


def continued_blend(
    sources: Sequence[OpenSource], record: BlendRecord, num_samples: int, settings: SampleSettings
) -> BlendedDataset:
    """Return the blend that began in the middle of the run, as the checkpoint's record has it.

    Args:
        sources: Of training.
        record: The checkpoint's, of a blend that did not begin with the run.
        num_samples: Of the whole run.
        settings: Of all samples.

    Raises:
        ConfigError: These are not the record's sources and weights.
    """
    sources, weights = weigh(sources, settings.sequence_length)
    keys = tuple(_key(one) for one in sources)
    known = [one for one, weight in zip(record.sources, record.weights, strict=True) if weight > 0]
    was = tuple(weight for weight in record.weights if weight > 0)
    if keys != tuple(one.key for one in known) or tuple(weights) != was:
        raise ConfigError(
            "sources or weights are not the checkpoint's",
            why=f"checkpoint: {_shown([one.name for one in known], was)}; "
            f"this run: {_shown([one.name for one in sources], weights)}",
            hint="`--change-blend` goes on with the new ones, each source from where it is",
        )
    return _blend(
        sources,
        weights,
        record,
        num_samples,
        settings,
        start=record.start,
        taken=[one.taken for one in known],
    )


def changed_blend(
    sources: Sequence[OpenSource],
    record: BlendRecord,
    position: int,
    num_samples: int,
    settings: SampleSettings,
) -> BlendedDataset:
    """Return a blend that begins at *position* with what its sources have not yet given.

    A source that the run had before, if only in an earlier blend, goes on at the sample where it
    stopped; after the last sample of its index comes an index of its own, shuffled anew.

    Args:
        sources: Of training, with their new weights.
        record: The checkpoint's.
        position: Samples that the run has consumed.
        num_samples: Of the whole run.
        settings: Of all samples.

    Raises:
        ConfigError: A source is no longer what the checkpoint knows under its name.
    """
    sources, weights = weigh(sources, settings.sequence_length)
    taken = []
    for one in sources:
        known = _known(one, record)
        taken.append(known.consumed if known else 0)
    return _blend(sources, weights, record, num_samples, settings, start=position, taken=taken)


def _blend(
    sources: Sequence[OpenSource],
    weights: Sequence[float],
    record: BlendRecord,
    num_samples: int,
    settings: SampleSettings,
    *,
    start: int,
    taken: Sequence[int],
) -> BlendedDataset:
    size, wanted = source_sizes(weights, max(num_samples - start, 1))
    streams = [
        _stream(one, _known(one, record), base + count, settings)
        for one, base, count in zip(sources, taken, wanted, strict=True)
    ]
    here = {stream.key for stream in streams}
    retired = [one for one in record.sources if one.key not in here]
    directory = index_cache_dir(sources[0].indexed, settings.cache_dir)
    index = blend_index(weights, size, directory, "train")
    return BlendedDataset(
        streams, weights, size, start=start, taken=taken, index=index, retired=retired
    )


def _stream(
    source: OpenSource, known: SourceRecord | None, needed: int, settings: SampleSettings
) -> SourceStream:
    """Return a source's samples up to *needed*, in the order in which the run began them."""
    if known is None:
        return build_stream(source, [needed], settings, "train")
    stream = build_stream(source, known.requested, settings, "train")
    if stream.order != known.order:
        raise ConfigError(
            f"the samples of `{source.name}` are not in the checkpoint's order",
            why="seed, sequence length or `--final-epoch-threshold` differ; samples would be "
            "repeated or left out",
            hint="give the first run's settings; `--change-blend` changes sources and weights only",
        )
    if stream.available >= needed:
        return stream
    further = [*known.requested, needed - stream.available]
    return build_stream(source, further, settings, "train")


def _known(source: OpenSource, record: BlendRecord) -> SourceRecord | None:
    """Return what the record has of a source; None for a new one."""
    key = _key(source)
    same = [one for one in record.sources if one.key == key]
    for one in same:
        if one.name == source.name:
            return one
    if same:
        return same[0]  # moved, or named otherwise
    for one in record.sources:
        if one.name == source.name:
            raise ConfigError(
                f"`{source.name}` is not what the checkpoint's run read under this name",
                why="its documents or `--split` have changed; samples would be repeated",
                hint="give it as it was, or the new data under another name",
            )
    return None


def _key(source: OpenSource) -> str:
    return content_fingerprint(source.indexed, source.indexed.sequence_range(source.documents))


def _shown(names: Sequence[str], weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:.4g} `{name}`" for name, weight in zip(names, weights, strict=True))
