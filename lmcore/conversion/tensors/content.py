"""`CheckpointContent`: all tensors of a checkpoint of any format, by name, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError, nearest
from lmcore.checkpoint import (
    CheckpointReader,
    TensorEntry,
    num_bytes,
    read_manifest,
    verify_checkpoint,
)
from lmcore.checkpoint.verify import damaged
from lmcore.contract.dtype import dtype_name
from lmcore.conversion.formats import read_state
from lmcore.conversion.native.manifest import stored_name
from lmcore.conversion.state import recorded_samples
from lmcore.model.checkpoint_format import format_of, formats

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest

__all__ = [
    "CheckpointContent",
    "TensorStatistics",
    "content_of",
    "matching",
    "name_hint",
    "statistics_of",
]


@dataclass(frozen=True)
class CheckpointContent:
    """Tensors of a checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        format: Title of its format.
        tensors: Dtype and shape of each tensor, by name; tensors of other formats have the names
            that they have in a checkpoint of lmcore.
        read: Function that returns a whole tensor, on the CPU.
        model_shape: Shape of the model, by the names of `ModelShape`.
        manifest: Manifest of a checkpoint of lmcore; None for another format.
        notes: Differences between the checkpoint and the model of lmcore, for the user.
        tokenizer: Type of the tokenizer of another format's checkpoint; None if it has none.
        precision: Precision of the run of another program; None if it is not recorded.
        layout: Sizes of the parallel axes of the run of another program; see `ModelState`.
        step: Number of steps of the run that wrote it; None if it is not recorded.
        consumed_samples: Number of samples that the run saw in training; None if not recorded.
    """

    path: Path
    format: str
    tensors: Mapping[str, TensorEntry]
    read: Callable[[str], Tensor]
    model_shape: Mapping[str, Any]
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    tokenizer: str | None = None
    precision: str | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    consumed_samples: int | None = None

    @property
    def num_parameters(self) -> int:
        """Number of the model's parameters."""
        weights = (one for name, one in self.tensors.items() if name.startswith("model."))
        return sum(math.prod(entry.shape) for entry in weights)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(num_bytes(entry) for entry in self.tensors.values())


def content_of(path: Path, *, verify: bool = False) -> CheckpointContent:
    """Return the content of a checkpoint.

    Args:
        path: Directory of one checkpoint, of any format.
        verify: Compare files with their checksums, as a reader of tensors should.

    Raises:
        CheckpointError: It is damaged, or of no known format.
    """
    name = format_of(path)
    if name in {None, "lmcore"}:
        problems = verify_checkpoint(path) if verify else []
        if problems:
            raise damaged(path, problems)
        reader = CheckpointReader(path, read_manifest(path))
        manifest = reader.manifest
        shape = manifest.model_shape
        counters = manifest.meta.get("counters")
        samples = counters.get("consumed_samples") if isinstance(counters, Mapping) else None
        return CheckpointContent(
            *(path, "lmcore", manifest.tensors, reader.read, shape, manifest),
            step=manifest.iteration,
            consumed_samples=samples if type(samples) is int else None,
        )
    assert name is not None
    state = read_state(path, name, compare=verify)
    names = {
        stored_name(parameter, kind): (parameter, kind)
        for kind in state.kinds
        for parameter in state.parameters
    }
    tensors = {
        stored: TensorEntry(dtype_name(state.dtype(*key)), state.parameters[key[0]])
        for stored, key in names.items()
    }
    tokenizer = state.tokenizer.tokenizer_type if state.tokenizer is not None else None
    return CheckpointContent(
        path,
        formats()[name].title,
        tensors,
        lambda stored: state.read(*names[stored]),
        state.shape.to_dict(),
        notes=(*state.notes, *state.training_notes),
        tokenizer=state.tokenizer_type or tokenizer,
        precision=state.precision,
        layout=state.layout,
        step=state.progress.iteration if state.progress is not None else None,
        consumed_samples=recorded_samples(state),
    )


def matching(content: CheckpointContent, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the tensors that match any of *patterns*, in order; all without patterns.

    Args:
        content: Content of the checkpoint.
        patterns: Patterns of names, in which `*` matches any characters.

    Raises:
        ConfigError: A pattern matches no tensor.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in content.tensors):
            raise ConfigError(
                f"`{pattern}` matches no tensor of `{content.path}`",
                hint=name_hint(pattern, content.tensors),
            )
    return [
        name
        for name in content.tensors
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def name_hint(pattern: str, names: Iterable[str]) -> str:
    """Return the hint of an error for a pattern that matches none of *names*."""
    close = nearest(pattern, list(names))
    if close is not None:
        return f"did you mean `{close}`?"
    return "`lmcore checkpoint inspect` lists the names; `*` matches any characters"


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's finite values; None if there are none.

    Attributes:
        norm: Euclidean norm.
        minimum, maximum, mean: Smallest, largest and mean value.
        non_finite: Number of values that are NaN or infinite.
    """

    norm: float | None
    minimum: float | None
    maximum: float | None
    mean: float | None
    non_finite: int


def statistics_of(tensor: Tensor) -> TensorStatistics:
    """Return the statistics of a tensor, computed in float64 a part at a time."""
    square = total = 0.0
    low, high, count, non_finite = math.inf, -math.inf, 0, 0
    for part in _parts(tensor):
        finite = part[part.isfinite()]
        non_finite += part.numel() - finite.numel()
        if not finite.numel():
            continue
        count += finite.numel()
        square += float(finite.square().sum())
        total += float(finite.sum())
        low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if not count:
        return TensorStatistics(None, None, None, None, non_finite)
    return TensorStatistics(math.sqrt(square), low, high, total / count, non_finite)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the values in float64, a few millions at a time."""
    for part in tensor.reshape(-1).split(4 * 2**20):
        yield part.to(torch.float64)
