"""Blend index: the dataset of each sample of a blend, chosen by Megatron's greedy rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from lmcore.data import native

__all__ = [
    "BlendIndex",
    "BlendWeights",
    "build_blend_index",
    "build_blend_index_python",
    "build_exhaustive_index",
    "normalize",
    "source_sizes",
]

_SURPLUS = 0.005
"""Fraction of a source's samples that is built beyond its share."""

BlendIndex = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]


def normalize(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, with numpy's rounding, as Megatron."""
    values = np.array(weights, dtype=np.float64)
    return [float(weight) for weight in values / np.sum(values)]


@dataclass(frozen=True)
class BlendWeights:
    """Weights of the sources of a blend, normalized.

    megatron-core normalizes weights of the user twice: for the sizes of the sources, and once more
    for the greedy rule.  The last bits decide ties of that rule, and with them the order.

    Attributes:
        sizes: Weights that the sizes of the sources are computed from (`source_sizes`).
        order: Weights of the greedy rule (`build_blend_index`).

    Source:
        megatron-core, `BlendedMegatronDatasetBuilder` and `BlendedDataset`.
    """

    sizes: list[float]
    order: list[float]

    @classmethod
    def given(cls, weights: Sequence[float], rule: str) -> Self:
        """Return the weights of sources that the user weighted.

        Args:
            weights: The user's weight of each source.
            rule: Value of `--blend-rule`; lmcore 2026.11 normalized weights once.
        """
        once = normalize(weights)
        return cls(once, normalize(once) if rule == "megatron-core" else once)

    @classmethod
    def by_size(cls, lengths: Sequence[int]) -> Self:
        """Return the weights of sources without weights, from the number of their samples."""
        once = normalize(lengths)
        return cls(once, once)


def source_sizes(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """Return the size of a blend, and the number of samples to build of each source.

    Each source's share is rounded up, so the blend may be slightly longer than requested.  0.5%
    more samples of each source are built, because the greedy rule may exceed its share.

    Args:
        weights: Normalized weight of each source.
        num_samples: Minimum number of samples in the blend.

    Source:
        Megatron-LM, `BlendedMegatronDatasetBuilder`.
    """
    shares = [math.ceil(num_samples * weight) for weight in weights]
    return sum(shares), [math.ceil(share * (1 + _SURPLUS)) for share in shares]


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Choose for each sample the dataset that is furthest behind its weight.

    Args:
        weights: Normalized weight of each dataset.
        size: Number of samples.

    Returns:
        The dataset of each sample, int16 [size], and its number in that dataset, int64 [size].

    Raises:
        ValueError: There are no weights, more than 32,767, or a negative or non-finite weight; or
            *size* is negative.

    Source:
        Megatron-LM, `build_blending_indices` in `megatron/core/datasets/helpers.cpp`.
    """
    values = _checked(weights, size)
    if native.builders is not None:
        return native.builders.build_blend_index(values, size)
    return build_blend_index_python(values, size)


def build_blend_index_python(weights: Sequence[float] | np.ndarray, size: int) -> BlendIndex:
    """Build the same arrays as `build_blend_index` in Python: its fallback and its oracle."""
    values: list[float] = _checked(weights, size).tolist()
    dataset = np.empty(size, dtype=np.int16)
    sample = np.empty(size, dtype=np.int64)
    taken = [0] * len(values)
    for i in range(size):
        n = max(i, 1)
        errors = [weight * n - count for weight, count in zip(values, taken, strict=True)]
        chosen = errors.index(max(errors))
        dataset[i], sample[i] = chosen, taken[chosen]
        taken[chosen] += 1
    return dataset, sample


def build_exhaustive_index(lengths: Sequence[int]) -> BlendIndex:
    """Choose each sample of every dataset once, by the greedy rule with the lengths as weights.

    Args:
        lengths: Number of samples in each dataset.

    Returns:
        The same arrays as `build_blend_index`, of `sum(lengths)` samples.

    Source:
        Megatron-LM, `build_exhaustive_blending_indices` in `megatron/core/datasets/helpers.cpp`.
    """
    total = sum(lengths)
    weights = normalize(lengths)
    dataset, sample = build_blend_index(weights, total)
    beyond = np.flatnonzero(sample >= np.asarray(lengths, dtype=np.int64)[dataset])
    # Up to the first sample beyond a dataset's end both rules make the same choices.
    first = int(beyond[0]) if beyond.size else total
    taken = np.bincount(dataset[:first], minlength=len(lengths)).tolist()
    for i in range(first, total):
        n = max(i, 1)
        left = [d for d, length in enumerate(lengths) if taken[d] < length]
        chosen = max(left, key=lambda d: weights[d] * n - taken[d])  # the first maximum
        dataset[i], sample[i] = chosen, taken[chosen]
        taken[chosen] += 1
    return dataset, sample


def _checked(weights: Sequence[float] | np.ndarray, size: int) -> npt.NDArray[np.float64]:
    values = np.ascontiguousarray(weights, dtype=np.float64)
    if values.ndim != 1 or not 1 <= values.size <= np.iinfo(np.int16).max:
        raise ValueError(f"a blend needs 1 to 32,767 datasets, got {values.size}")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("weights of a blend must be finite and not negative")
    if size < 0:
        raise ValueError(f"a blend needs 0 or more samples, got {size}")
    return values
