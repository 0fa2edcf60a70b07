"""Comparison of two checkpoints of any formats, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcore.conversion.tensors.content import matching

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.conversion.tensors.content import CheckpointContent

__all__ = ["Difference", "TensorDifference", "compare"]


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two tensors of one name, dtype and shape.

    Attributes:
        name: Name of the tensors.
        largest: Largest absolute difference of two values; infinite if a value is NaN or infinite
            in one of them only.
        relative: Norm of the difference by the norm of the first; infinite if that is 0.
        count: Number of values that differ by more than the tolerance.
    """

    name: str
    largest: float
    relative: float
    count: int


@dataclass(frozen=True)
class Difference:
    """Differences between two checkpoints.

    Attributes:
        only_first, only_second: Names of tensors that one of them has.
        forms: Dtype and shape of tensors that differ in them, by name.
        shapes: Names of tensors of another shape.
        values: Tensors whose values differ.
        equal: Number of tensors that are equal; with a tolerance, whose values differ by it at
            most, in any dtype.
        shape: Values of the model's shape that differ, by name.
        settings: Settings of the runs that differ, by name; empty unless both are of lmcore.
    """

    only_first: Sequence[str]
    only_second: Sequence[str]
    forms: Mapping[str, tuple[str, str]]
    shapes: Sequence[str]
    values: Sequence[TensorDifference]
    equal: int
    shape: Mapping[str, tuple[Any, Any]]
    settings: Mapping[str, tuple[Any, Any]]
    tolerance: float = 0.0

    @property
    def found(self) -> bool:
        """True if a tensor or the model's shape differs; with a tolerance, more than by dtype."""
        forms = self.shapes if self.tolerance else self.forms
        return bool(self.only_first or self.only_second or forms or self.values or self.shape)

    @property
    def unequal(self) -> int:
        """Number of tensors that both have and that differ."""
        forms = self.shapes if self.tolerance else self.forms
        return len({*forms, *(one.name for one in self.values)})

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON; distances that are infinite are null."""
        found = {**asdict(self), "differ": self.found}
        for one in found["values"]:  # JSON has no infinity
            one |= {key: None for key in ("largest", "relative") if math.isinf(one[key])}
        return found


def compare(
    first: CheckpointContent,
    second: CheckpointContent,
    *,
    patterns: tuple[str, ...] = (),
    tolerance: float = 0.0,
) -> Difference:
    """Return the differences between two checkpoints; two tensors at a time are in memory.

    Args:
        first: Content of one checkpoint.
        second: Content of the other.
        patterns: Patterns of the names to compare; empty: all.
        tolerance: Largest absolute difference of values that count as equal; above 0, tensors may
            have different dtypes.

    Raises:
        CheckpointError: A file is damaged.
        ConfigError: A pattern matches no tensor of either.
    """
    settings = _settings(first), _settings(second)
    both = dataclasses.replace(first, tensors={**second.tensors, **first.tensors})
    chosen = matching(both, patterns)
    ours = [name for name in chosen if name in first.tensors]
    theirs = {name for name in chosen if name in second.tensors}
    forms, shapes, values, equal = {}, [], [], 0
    for name in ours:
        if name not in theirs:
            continue
        entries = first.tensors[name], second.tensors[name]
        if entries[0] != entries[1]:
            one, other = (f"{entry.dtype} {list(entry.shape)}" for entry in entries)
            forms[name] = (one, other)
        if entries[0].shape != entries[1].shape:
            shapes.append(name)
            continue
        found = _differing(name, first.read(name), second.read(name), tolerance)
        if found is not None:
            values.append(found)
        elif tolerance or entries[0] == entries[1]:
            equal += 1
    return Difference(
        only_first=[name for name in ours if name not in theirs],
        only_second=sorted(theirs - set(ours)),
        forms=forms,
        shapes=shapes,
        values=sorted(values, key=lambda one: -one.relative),
        equal=equal,
        shape=_changes(first.model_shape, second.model_shape),
        settings=_changes(*settings) if all(settings) else {},
        tolerance=tolerance,
    )


def _differing(
    name: str, first: Tensor, second: Tensor, tolerance: float
) -> TensorDifference | None:
    if first.dtype == second.dtype and torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8),
        second.contiguous().reshape(-1).view(torch.uint8),
    ):
        return None
    largest = square = norm = 0.0
    count = 0
    size = 4 * 2**20
    for one, other in zip(
        first.reshape(-1).split(size), second.reshape(-1).split(size), strict=True
    ):
        a, b = one.to(torch.float64), other.to(torch.float64)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf)
        largest = max(largest, float(gap.max()))
        square += float(gap.square().sum())
        norm += float(a.nan_to_num(0.0, 0.0, 0.0).square().sum())
        count += int((gap > tolerance).sum())
    if not count:
        return None
    relative = math.sqrt(square / norm) if norm else math.inf
    return TensorDifference(name, largest, relative, count)


def _settings(content: CheckpointContent) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint of lmcore, by `section.name`."""
    config: Any = content.manifest.meta.get("config") if content.manifest is not None else None
    sections = config.get("config") if isinstance(config, Mapping) else None
    if not isinstance(sections, Mapping):
        return {}
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }


def _changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*first, *(name for name in second if name not in first)]
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }
