"""Blended dataset: samples of several sources by their weights, and its record in checkpoints.

A blend that begins in the middle of a run starts at the run's position, and at the sample that each
source has reached: after a change of weights no source repeats a sample before its end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np

from lmcore.base.errors import CheckpointError
from lmcore.data.blend.index import BlendIndex, build_blend_index
from lmcore.data.indexed.mapped_files import MappedFiles

__all__ = [
    "BlendRecord",
    "BlendedDataset",
    "ShortSourceError",
    "SourceIndex",
    "SourceRecord",
    "SourceSamples",
    "SourceStream",
]


class SourceIndex(Protocol):
    """Samples of one index of a source."""

    @property
    def available(self) -> int:
        """Number of samples."""

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""

    def read(self, i: int) -> Any:
        """Return sample *i*."""


class SourceSamples(SourceIndex, Protocol):
    """Samples of a source, in the order of training.

    Attributes:
        key: Fingerprint of the documents' content, independent of their path.
    """

    key: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


@dataclass(frozen=True)
class SourceRecord:
    """Record of a source in a checkpoint.

    Attributes:
        name: The user's name of the source, for messages.
        key: Fingerprint of its documents (`content_fingerprint`).
        order: Fingerprint of the samples' order in its indices.
        requested: Number of samples requested of each of its indices; the first index uses the
            run's seed, each further one the next seed.
        taken: Number of samples consumed before the blend began.
        consumed: Number of samples consumed until now.
    """

    name: str
    key: str
    order: str
    requested: tuple[int, ...]
    taken: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class BlendRecord:
    """Record of the run's sources in a checkpoint.

    Attributes:
        start: Number of samples that the run had consumed when this blend began.
        weights: Weight of each source by the greedy rule (`BlendWeights.order`); 0 if the blend no
            longer has it.
        sources: Every source that the run has ever had.
    """

    start: int
    weights: tuple[float, ...]
    sources: tuple[SourceRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, for a checkpoint's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the record of a result of `to_dict`.

        Raises:
            CheckpointError: The values are not such a result.
        """
        try:
            sources = tuple(
                SourceRecord(
                    str(source["name"]),
                    str(source["key"]),
                    str(source["order"]),
                    tuple(int(count) for count in source["requested"]),
                    int(source["taken"]),
                    int(source["consumed"]),
                )
                for source in values["sources"]
            )
            weights = tuple(float(weight) for weight in values["weights"])
            record = cls(int(values["start"]), weights, sources)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint's record of its data sources cannot be read", why=repr(error)
            ) from None
        if len(record.weights) != len(record.sources):
            raise CheckpointError("the checkpoint's record of its data sources is damaged")
        return record


class ShortSourceError(ValueError):
    """A source with fewer samples than the blend takes from it.

    Attributes:
        needed: Number of samples that the blend takes from each source.
    """

    def __init__(self, needed: Sequence[int], available: Sequence[int]) -> None:
        super().__init__(f"{list(needed)} samples needed, {list(available)} available")
        self.needed = tuple(needed)


class SourceStream:
    """Source of a blend: the samples of its indices, one index after another.

    Args:
        name: The user's name of the source.
        key: Fingerprint of its documents.
        parts: The indices, each used to its end before the next.
        requested: Number of samples requested of each index.
    """

    def __init__(
        self, name: str, key: str, parts: Sequence[SourceIndex], requested: Sequence[int]
    ) -> None:
        self.name, self.key = name, key
        self.requested = tuple(requested)
        self.parts = tuple(parts)
        self._ends = np.cumsum([part.available for part in parts]).tolist()

    @property
    def available(self) -> int:
        """Number of samples in all indices together."""
        return int(self._ends[-1])

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""
        return "+".join(part.order for part in self.parts)

    def read(self, i: int) -> Any:
        """Return sample *i* of the stream."""
        start = 0
        for part, end in zip(self.parts, self._ends, strict=True):
            if i < end:
                return part.read(i - start)
            start = end
        raise IndexError(f"sample {i} of {self.available} of `{self.name}`")


class BlendedDataset:
    """Blend of sources by Megatron's greedy rule (see `build_blend_index`).

    Args:
        sources: Samples of each source.
        weights: Weight of each source by the greedy rule (`BlendWeights.order`).
        size: Number of samples in the blend.
        start: Position of its first sample; earlier positions belong to an earlier blend.
        taken: Number of samples consumed from each source before *start*.
        index: The blend's index, if it is built already.
        retired: Records of sources that the run no longer uses.

    Raises:
        ShortSourceError: A source has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        sources: Sequence[SourceStream],
        weights: Sequence[float],
        size: int,
        *,
        start: int = 0,
        taken: Sequence[int] | None = None,
        index: BlendIndex | None = None,
        retired: Sequence[SourceRecord] = (),
    ) -> None:
        self.sources, self.weights = tuple(sources), tuple(weights)
        self.start, self.size = start, size
        self.taken = tuple(taken) if taken is not None else (0,) * len(self.sources)
        self._retired = tuple(retired)
        self._source_index, self._sample_index = (
            index if index is not None else build_blend_index(self.weights, size)
        )
        self._files = MappedFiles(self._source_index, self._sample_index)
        if not len(self.sources) == len(self.weights) == len(self.taken):
            raise ValueError("a blend has a weight and a count for each source")
        self._needed = needed = self.consumed(start + size)
        available = [source.available for source in self.sources]
        if any(count > limit for count, limit in zip(needed, available, strict=True)):
            raise ShortSourceError(needed, available)

    def __len__(self) -> int:
        """Return the number of positions, including positions before the blend."""
        return self.start + self.size

    def __getitem__(self, i: int) -> Any:
        """Return the sample at position *i* of the run.

        Raises:
            DataError: A file was cut short since it was opened.
            IndexError: *i* is not a position of this blend.
        """
        with self._files.reading(i):
            source, sample = self.locate(i)
        return self.sources[source].read(sample)

    def locate(self, i: int) -> tuple[int, int]:
        """Return the numbers of source and sample at position *i*.

        Raises:
            IndexError: *i* is not a position of this blend.
        """
        if not self.start <= i < len(self):
            raise IndexError(f"sample {i} of a blend of samples {self.start} to {len(self) - 1}")
        source = int(self._source_index[i - self.start])
        return source, self.taken[source] + int(self._sample_index[i - self.start])

    def consumed(self, position: int) -> list[int]:
        """Return the number of samples of each source before *position*."""
        with self._files.reading("the blend"):
            before = self._source_index[: max(position - self.start, 0)]
            counts = np.bincount(before, minlength=len(self.sources)).tolist()
        return [base + int(count) for base, count in zip(self.taken, counts, strict=True)]

    @property
    def needed(self) -> list[int]:
        """Number of samples of each source up to the end of the blend."""
        return list(self._needed)

    @property
    def unused(self) -> list[str]:
        """Names of the sources that no sample is taken from."""
        pairs = zip(self.sources, self._needed, self.taken, strict=True)
        return [source.name for source, count, before in pairs if count == before]

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order, independent of their number."""
        orders = [source.order for source in self.sources]
        settings = [orders, self.weights, self.start, self.taken]
        return hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    def record(self, position: int) -> BlendRecord:
        """Return the record for a checkpoint at *position*."""
        now = self.consumed(position)
        sources = [
            SourceRecord(source.name, source.key, source.order, source.requested, base, count)
            for source, base, count in zip(self.sources, self.taken, now, strict=True)
        ]
        weights = (*self.weights, *(0.0 for _ in self._retired))
        return BlendRecord(self.start, weights, (*sources, *self._retired))
