"""Sources of a rank's tensors: whole tensors in files, ZeRO's partitions, universal checkpoints."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.conversion.cast import FLOAT_DTYPES
from lmcore.conversion.foreign_pickle.load import load_tensors
from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.huggingface.weights import StoredTensor
from lmcore.conversion.megatron.optimizer.groups import group_values, step_of
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError
from lmcore_deepspeed.checkpoint.loss_scaler import deepspeed_loss_scale
from lmcore_deepspeed.checkpoint.zero import Partitions, Shapes, join_pieces, saved_step

__all__ = ["Frozen", "InFile", "Source", "Universal", "Zero"]

_COPY = "copy all files of the universal checkpoint again"
_STEP, _STATE = "step.pt", "optimizer_state.pt"


class Source(ABC):
    """Tensors of one file, or of files that belong together.

    Attributes:
        tensors: Dtype, shape and file of each tensor.
        kinds: Kinds of tensors of every parameter.
        step: Number of updates by the optimizer; None if it is not known.
        settings: Settings of Adam, with the names of `Progress.adam`; empty if not known.
        loss_scale: Loss scale, with the names of `Progress.loss_scale`; None without one.
        without_adam: Reason for which files of an optimizer give no state of Adam; None if they
            do, or if there are none.
    """

    tensors: dict[str, StoredTensor]
    kinds: tuple[str, ...] = (WEIGHT,)
    step: int | None = None
    settings: Mapping[str, float] = MappingProxyType({})
    loss_scale: Mapping[str, float] | None = None
    without_adam: str | None = None

    @abstractmethod
    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor.

        Args:
            name: Name in the module.
            kind: Kind of tensor, one of `kinds`.
        """

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor; see `read`."""
        assert kind == WEIGHT, "the source has weights only"
        return self.tensors[name].dtype or torch.float32


class InFile(Source):
    """Whole tensors of one file."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._held = tensors
        self.tensors = {name: _stored(tensor, path) for name, tensor in tensors.items()}

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor; see `Source`."""
        assert kind == WEIGHT, "the source has weights only"
        return self._held[name]


class Frozen(Source):
    """Parameters that are not trained; with ZeRO-3 each data-parallel rank has a share."""

    def __init__(self, path: Path, shapes: Shapes, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        self._ranks = ranks
        self._shapes = {name: shape for group in shapes for name, shape in group.items()}
        self.tensors = {}
        for name, shape in self._shapes.items():
            shares = [rank.get(name) for rank in ranks]
            found = sum(share.numel() for share in shares if share is not None)
            if None in shares or found < math.prod(shape):
                raise CheckpointError(f"`{path}` is damaged", why=f"`{name}` is not complete")
            self.tensors[name] = StoredTensor(ranks[0][name].dtype, shape, path)

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor; see `Source`."""
        assert kind == WEIGHT, "the source has weights only"
        shape = self._shapes[name]
        whole = join_pieces(rank[name].detach().flatten() for rank in self._ranks)
        return whole[: math.prod(shape)].view(shape)


class Zero(Source):
    """Weights in float32 and states of Adam in ZeRO's partitions.

    Attributes:
        path: File of the first data-parallel rank.
    """

    def __init__(self, path: Path, partitions: Partitions) -> None:
        self.path, self._partitions, self.kinds = path, partitions, partitions.kinds
        self.without_adam = partitions.without_adam
        self.step, self.settings = partitions.step, partitions.settings
        self.loss_scale = partitions.loss_scale
        self.tensors = {
            name: StoredTensor(partitions.dtype(name, WEIGHT), shape, path)
            for name, shape in partitions.shapes.items()
        }

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor; see `Source`."""
        return self._partitions.dtype(name, kind)

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor; see `Source`."""
        return self._partitions.read(name, kind)


class Universal(Source):
    """Directories of the parameters of a universal checkpoint, over all ranks.

    A file has its tensor under `param`; converted from ZeRO-3, it is a flat tensor.
    """

    def __init__(
        self,
        directory: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        weights_only: bool,
        compare: bool = True,
    ) -> None:
        self._directory, self._compare = directory, compare
        self.tensors = {}
        self._weights: dict[str, tuple[Tensor, bool]] = {}
        states = [f"{kind}.pt" for kind in ADAM]
        missing: list[Path] = []
        for path in sorted(directory.glob("*/fp32.pt")):
            name = path.parent.name
            self._weights[name] = tensor, flat = self._content(name, "fp32")
            shape = shapes.get(name, ()) if flat else tuple(tensor.shape)
            if math.prod(shape) != tensor.numel():
                raise CheckpointError(
                    f"`{path}` does not fit the model",
                    why=f"it has {tensor.numel():,} elements, `param_shapes` {list(shape)}",
                )
            self.tensors[name] = StoredTensor(_stored(tensor, path).dtype, shape, path)
            missing += [one for file in states if not (one := path.parent / file).is_file()]
        if not self.tensors:
            raise CheckpointError(
                f"`{directory}` is not complete", why="it has no `NAME/fp32.pt`", hint=_COPY
            )
        if weights_only:
            return
        if 0 < len(missing) < len(states) * len(self.tensors):
            raise OptimizerStateError(
                f"`{directory}` is not complete",
                why=f"Adam's state lacks {counted(len(missing), 'file')}, such as "
                f"`{missing[0].parent.name}/{missing[0].name}`",
                hint=f"{_COPY}, or take the weights: `lmcore checkpoint convert --weights-only`",
            )
        if missing:
            self.without_adam = f"the universal checkpoint has no `NAME/{states[0]}`"
        else:
            self.kinds = (WEIGHT, *ADAM)
            self.step = self._step(next(iter(self.tensors)))
            optimizer = self._optimizer()
            self.settings = group_values(optimizer)[1]
            self.loss_scale = deepspeed_loss_scale(optimizer.get("loss_scaler"))

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor; see `Source`."""
        if kind == WEIGHT:
            return super().dtype(name, kind)
        return self._content(name, kind, compare=False)[0].dtype

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor; see `Source`."""
        # Weights stay mapped, as opening a file compares its checksums, which reads all of it.
        tensor, flat = self._weights[name] if kind == WEIGHT else self._content(name, kind)
        expected = self.tensors[name].shape
        fits = tensor.numel() == math.prod(expected)
        if not fits or not (flat or tuple(tensor.shape) == expected):
            raise CheckpointError(
                f"`{self._directory / name}` is damaged",
                why=f"`{kind}.pt` has shape {list(tensor.shape)}, `fp32.pt` {list(expected)}",
            )
        return tensor.reshape(expected)

    def _content(self, name: str, kind: str, *, compare: bool = True) -> tuple[Tensor, bool]:
        """Return the tensor of a file, and True if the file has no shape of it."""
        path = self._directory / name / f"{kind}.pt"
        content = load_tensors(path, compare=self._compare and compare)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"`{path}` is damaged", why="it has no `param`")
        return tensor.detach(), not isinstance(content, dict)

    def steps(self) -> dict[str, int]:
        """Return the number of updates that files state, by their path inside of the checkpoint.

        Damaged files state none: where their content is needed, they were refused before.
        """
        first = next(iter(self.tensors))
        found: dict[str, int | None] = {}
        with contextlib.suppress(CheckpointError):
            found[f"{first}/{_STEP}"] = self._parameter_step(first)
        with contextlib.suppress(CheckpointError):
            found[_STATE] = saved_step(self._optimizer())
        return {
            f"{self._directory.name}/{file}": step
            for file, step in found.items()
            if step is not None
        }

    def _step(self, name: str) -> int | None:
        if (self._directory / name / _STEP).is_file():
            return self._parameter_step(name)
        return saved_step(self._optimizer())

    def _parameter_step(self, name: str) -> int | None:
        path = self._directory / name / _STEP
        return step_of(load_tensors(path)) if path.is_file() else None

    def _optimizer(self) -> Mapping[str, Any]:
        path = self._directory / _STATE
        return load_content(path) if path.is_file() else {}


def _stored(tensor: Tensor, path: Path) -> StoredTensor:
    dtype = tensor.dtype if tensor.dtype in FLOAT_DTYPES else None
    return StoredTensor(dtype, tuple(tensor.shape), path)
