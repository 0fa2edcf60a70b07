"""Samples of several sources by their weights, and what a run has consumed of each.

A blend that begins in the middle of a run starts at the run's position, and at the samples that
each source has reached: with new weights no source gives a sample again before its end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from lmcore.data.blend.index import BlendIndex, build_blend_index
from lmcore.errors import CheckpointError

__all__ = [
    "BlendRecord",
    "BlendedDataset",
    "Samples",
    "ShortSourceError",
    "SourceRecord",
    "SourceStream",
]


class Samples(Protocol):
    """What a source gives: samples by position, as many as are available."""

    @property
    def available(self) -> int:
        """Number of samples."""

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i*."""


@dataclass(frozen=True)
class SourceRecord:
    """What a checkpoint keeps of a source.

    Attributes:
        name: As the user named it, for messages.
        key: Of its documents (`content_fingerprint`).
        order: Of its samples, as far as indices were made for them.
        requested: Samples asked of each of its indices, in turn; of the first with the run's
            seed, of each further one with the seed after it.
        taken: Samples that were consumed when the blend began.
        consumed: Samples consumed now.
    """

    name: str
    key: str
    order: str
    requested: tuple[int, ...]
    taken: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class BlendRecord:
    """What a checkpoint keeps of the run's sources.

    Attributes:
        start: Samples that the run had consumed when this blend began.
        weights: Of each source in the blend, normalized; 0 for one that it no longer has.
        sources: Every source that the run ever had.
    """

    start: int
    weights: tuple[float, ...]
    sources: tuple[SourceRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what `to_dict` wrote.

        Raises:
            CheckpointError: It is something else.
        """
        try:
            sources = tuple(
                SourceRecord(
                    str(one["name"]),
                    str(one["key"]),
                    str(one["order"]),
                    tuple(int(count) for count in one["requested"]),
                    int(one["taken"]),
                    int(one["consumed"]),
                )
                for one in values["sources"]
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
    """A source has fewer samples than the blend takes of it; `needed` says how many of each."""

    def __init__(self, needed: Sequence[int], available: Sequence[int]) -> None:
        super().__init__(f"{list(needed)} samples wanted of {list(available)}")
        self.needed = tuple(needed)


class SourceStream:
    """One source of a blend: its indices one after another, as one stream of samples.

    Args:
        name: As the user named it.
        key: Of its documents.
        parts: The indices' samples, each used to its end before the next.
        requested: What was asked of each.
    """

    def __init__(
        self, name: str, key: str, parts: Sequence[Samples], requested: Sequence[int]
    ) -> None:
        assert len(parts) == len(requested), "one number for each index"
        self.name, self.key = name, key
        self.requested = tuple(requested)
        self._parts = tuple(parts)
        self._ends = np.cumsum([part.available for part in parts]).tolist()

    @property
    def available(self) -> int:
        """Number of samples of all indices together."""
        return int(self._ends[-1])

    @property
    def order(self) -> str:
        """Fingerprint of the samples' order."""
        return "+".join(part.order for part in self._parts)

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return sample *i* of the stream."""
        start = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            if i < end:
                return part.read(i - start)
            start = end
        raise IndexError(f"sample {i} of {self.available} of `{self.name}`")


class BlendedDataset:
    """A blend of sources by Megatron's greedy rule.

    Args:
        sources: Where samples come from.
        weights: Of each source, normalized.
        size: Samples of the blend.
        start: Position of its first sample; those before belong to an earlier blend of the run.
        taken: Samples of each source that were consumed by then.
        index: The blend's index, if it is there already.
        retired: Sources that the run had once, for the record.

    Raises:
        ShortSourceError: A source does not have the samples that its weight asks for.
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
        if not len(self.sources) == len(self.weights) == len(self.taken):
            raise ValueError("a blend has a weight and a count for each source")
        needed = self.consumed(start + size)
        available = [source.available for source in self.sources]
        if any(count > there for count, there in zip(needed, available, strict=True)):
            raise ShortSourceError(needed, available)

    def __len__(self) -> int:
        """Return the number of positions, those before the blend included."""
        return self.start + self.size

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        """Return the sample at position *i* of the run: int64 [sequence_length + 1].

        Raises:
            IndexError: No such position, or one of an earlier blend.
        """
        source, sample = self.locate(i)
        return self.sources[source].read(sample)

    def locate(self, i: int) -> tuple[int, int]:
        """Return source and sample of position *i*.

        Raises:
            IndexError: As `__getitem__`.
        """
        if not self.start <= i < len(self):
            raise IndexError(f"sample {i} of a blend of samples {self.start} to {len(self) - 1}")
        source = int(self._source_index[i - self.start])
        return source, self.taken[source] + int(self._sample_index[i - self.start])

    def consumed(self, position: int) -> list[int]:
        """Return how many samples of each source lie before *position*."""
        before = self._source_index[: max(position - self.start, 0)]
        counts = np.bincount(before, minlength=len(self.sources)).tolist()
        return [base + int(count) for base, count in zip(self.taken, counts, strict=True)]

    @property
    def order(self) -> str:
        """Fingerprint of the order in which samples come, however many are wanted of them."""
        orders = [source.order for source in self.sources]
        facts = [orders, self.weights, self.start, self.taken]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def record(self, position: int) -> BlendRecord:
        """Return what a checkpoint at *position* keeps."""
        now = self.consumed(position)
        sources = [
            SourceRecord(one.name, one.key, one.order, one.requested, base, count)
            for one, base, count in zip(self.sources, self.taken, now, strict=True)
        ]
        weights = (*self.weights, *(0.0 for _ in self._retired))
        return BlendRecord(self.start, weights, (*sources, *self._retired))
