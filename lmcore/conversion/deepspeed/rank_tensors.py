"""Tensors of one rank of tensor parallelism, whatever the files that hold them.

Weights in float32 are in ZeRO's partitions; what these lack is in the module's weights, or in the
layer files of a pipeline, in the precision in which the model computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lmcore.conversion.deepspeed.directory import DeepSpeedDirectory, require_ranks
from lmcore.conversion.deepspeed.zero import (
    Partitions,
    Shapes,
    join_pieces,
    optimizer_state,
    partition_count,
    saved_step,
)
from lmcore.conversion.foreign_pickle import load_tensors
from lmcore.conversion.huggingface.weights import StoredTensor
from lmcore.conversion.megatron.moments import group_values, step_of
from lmcore.conversion.megatron.rank_file import flat_tensors
from lmcore.conversion.megatron.records import load_content
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.errors import CheckpointError, counted

__all__ = ["RankTensors", "open_rank", "universal_tensors"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OPTIMIZER = "zero_pp_rank_{}_mp_rank_%02d_optim_states.pt"
_COPY = "copy all files of the universal checkpoint again"
_MAX_DIMS = 8
_MAX_RANKS = 2**20


class _Source(ABC):
    """Tensors of one file, or of files that belong together."""

    tensors: dict[str, StoredTensor]
    kinds: tuple[str, ...] = (WEIGHT,)
    step: int | None = None
    settings: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def read(self, name: str, kind: str) -> Tensor: ...

    def dtype(self, name: str, kind: str) -> torch.dtype:
        assert kind == WEIGHT, "the source has weights only"
        return self.tensors[name].dtype or torch.float32


class _InFile(_Source):
    """Whole tensors of one file."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._held = tensors
        self.tensors = {name: _stored(tensor, path) for name, tensor in tensors.items()}

    def read(self, name: str, kind: str) -> Tensor:
        assert kind == WEIGHT, "the source has weights only"
        return self._held[name]


class _Frozen(_Source):
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
        assert kind == WEIGHT, "the source has weights only"
        shape = self._shapes[name]
        whole = join_pieces(rank[name].detach().flatten() for rank in self._ranks)
        return whole[: math.prod(shape)].view(shape)


class _Zero(_Source):
    """Weights in float32 and states of Adam in ZeRO's partitions."""

    def __init__(self, path: Path, partitions: Partitions) -> None:
        self._partitions, self.kinds = partitions, partitions.kinds
        self.step, self.settings = partitions.step, partitions.settings
        self.tensors = {
            name: StoredTensor(partitions.dtype(name, WEIGHT), shape, path)
            for name, shape in partitions.shapes.items()
        }

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return self._partitions.dtype(name, kind)

    def read(self, name: str, kind: str) -> Tensor:
        return self._partitions.read(name, kind)


class _Universal(_Source):
    """Directories of the parameters of a universal checkpoint, over all ranks.

    A file has its tensor under `param`; converted from ZeRO-3, it is a flat tensor.
    """

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._directory = directory
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
        if 0 < len(missing) < len(states) * len(self.tensors):
            raise CheckpointError(
                f"`{directory}` is not complete",
                why=f"Adam's state lacks {counted(len(missing), 'file')}, such as "
                f"`{missing[0].parent.name}/{missing[0].name}`",
                hint=_COPY,
            )
        if not missing:
            self.kinds = (WEIGHT, *ADAM)
            self.step = self._step(next(iter(self.tensors)))
            self.settings = self._settings()

    def dtype(self, name: str, kind: str) -> torch.dtype:
        return super().dtype(name, kind) if kind == WEIGHT else self._content(name, kind)[0].dtype

    def read(self, name: str, kind: str) -> Tensor:
        # Weights stay mapped, as opening a file compares its checksums, which reads all of it.
        tensor, flat = self._weights[name] if kind == WEIGHT else self._content(name, kind)
        expected = self.tensors[name].shape
        fits = tensor.numel() == math.prod(expected)
        if not fits or not (flat or tuple(tensor.shape) == expected):
            raise CheckpointError(
                f"`{self._directory / name}` is damaged",
                why=f"`{kind}.pt` has shape {list(tensor.shape)}, `fp32.pt` {list(expected)}",
            )
        return tensor.view(expected)

    def _content(self, name: str, kind: str) -> tuple[Tensor, bool]:
        """Return the tensor of a file, and True if the file has no shape of it."""
        path = self._directory / name / f"{kind}.pt"
        content = load_tensors(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"`{path}` is damaged", why="it has no `param`")
        return tensor.detach(), not isinstance(content, dict)

    def _step(self, name: str) -> int | None:
        path = self._directory / name / "step.pt"
        if path.is_file():
            return step_of(load_tensors(path))
        return saved_step(self._optimizer())

    def _settings(self) -> Mapping[str, float]:
        return group_values(self._optimizer())[1]

    def _optimizer(self) -> Mapping[str, Any]:
        path = self._directory / "optimizer_state.pt"
        return load_content(path) if path.is_file() else {}


class RankTensors:
    """Tensors of one rank of tensor parallelism, by their names in the module.

    Attributes:
        tensors: Dtype, shape and file of each tensor.
        aliases: Name of the parameter that a shared one is, by its name in the module.
        step: Number of updates by the optimizer; None if it is not known.
        settings: Settings of Adam, with the names of `Progress.adam`; empty if not known.
    """

    def __init__(self, sources: Sequence[_Source], aliases: Mapping[str, str]) -> None:
        """Combine *sources*; the first one that has a tensor is read."""
        self._sources: dict[str, _Source] = {}
        self._rounded: dict[str, _Source] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for source in sources:
            for name, tensor in source.tensors.items():
                if name not in self.tensors:
                    self.tensors[name], self._sources[name] = tensor, source
                # The last stage of a pipeline also has an embedding, with unused positions.
                elif isinstance(source, _InFile) and tensor.shape == self.tensors[name].shape:
                    self._rounded.setdefault(name, source)
        for alias, name in aliases.items():
            if name in self.tensors:
                self.tensors[alias], self._sources[alias] = (
                    self.tensors[name],
                    self._sources[name],
                )
        self.aliases = {alias: name for alias, name in aliases.items() if name in self.tensors}
        self.step = next((one.step for one in sources if one.step is not None), None)
        self.settings = next((one.settings for one in sources if one.settings), {})

    def has(self, name: str, kind: str) -> bool:
        """Return True if a tensor has *kind*."""
        return kind in self._sources[name].kinds

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._sources[name].dtype(self.aliases.get(name, name), kind)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor, on the CPU.

        Args:
            name: Name in the module.
            kind: Kind of tensor.

        Raises:
            CheckpointError: The file is damaged, or the float32 weight is not the one with which
                the model computed.
        """
        stored = self.aliases.get(name, name)
        found = self._sources[name].read(stored, kind)
        if kind == WEIGHT and stored in self._rounded:
            rounded = self._rounded[stored].read(stored, kind)
            if not torch.equal(found.to(rounded.dtype), rounded):
                path = self.tensors[name].file.parent
                raise CheckpointError(
                    f"the optimizer's files in `{path}` do not fit the model's",
                    why=f"the float32 weights of `{name}` are not the ones of the model",
                    hint="copy the files of all ranks again, of one checkpoint",
                )
        return found


def universal_tensors(directory: Path, content: Mapping[str, Any]) -> RankTensors:
    """Return the tensors of a universal checkpoint, joined over all ranks.

    Args:
        directory: Its directory `zero`.
        content: Content of the first rank's model file.

    Raises:
        CheckpointError: A file is damaged.
    """
    groups = _shapes(directory, content.get("param_shapes"))
    shapes = {name: shape for group in groups for name, shape in group.items()}
    return RankTensors([_Universal(directory, shapes)], _aliases(content))


def open_rank(
    directory: DeepSpeedDirectory,
    content: Mapping[str, Any],
    rank: int,
    tensor_size: int,
    size: int,
) -> RankTensors:
    """Return the tensors of one rank of tensor parallelism, over all stages of a pipeline.

    Args:
        directory: Files of the checkpoint.
        content: Content of the first rank's model file.
        rank: Rank of tensor parallelism.
        tensor_size: Number of ranks of tensor parallelism.
        size: Number of model-parallel ranks: stages times ranks of tensor parallelism.

    Raises:
        CheckpointError: Files are missing or damaged, or do not belong together.
    """
    zero: list[_Source] = []
    modules: list[_Source] = []
    aliases: dict[str, str] = {}
    for model_rank in range(rank, size, tensor_size):
        paths = _model_files(directory, model_rank)
        contents = [content if path == directory.first else load_content(path) for path in paths]
        zero += _zero_sources(directory, model_rank, contents)
        first = contents[0]
        if directory.partitions:
            zero += _frozen_sources(paths[0], contents)
        elif first.get("module") is not None:
            modules.append(_InFile(paths[0], dict(flat_tensors(paths[0], first["module"]))))
        aliases |= _aliases(first)
    modules += [
        _InFile(
            path,
            {f"{layer}.{name}": tensor for name, tensor in flat_tensors(path, load_content(path))},
        )
        for (layer, owner), path in sorted(directory.layers.items())
        if owner == rank
    ]
    return RankTensors([*zero, *modules], aliases)


def _aliases(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the parameter that each shared one is."""
    shared = content.get("shared_params")
    pairs = shared if isinstance(shared, dict) else {}
    return {str(one): str(other) for one, other in pairs.items()}


def _model_files(directory: DeepSpeedDirectory, model_rank: int) -> list[Path]:
    """Return the files with the weights of one model-parallel rank, by data-parallel rank."""
    if not directory.partitions:
        return [directory.models[model_rank]]
    found = {
        data: path for (data, rank), path in directory.partitions.items() if rank == model_rank
    }
    count = max((data for data, _ in directory.partitions), default=0) + 1
    optimizers = [data + 1 for data, rank in directory.optimizers if rank == model_rank]
    name = f"zero_pp_rank_{{}}_mp_rank_{model_rank:02d}_model_states.pt"
    require_ranks(directory.path, "data parallelism", set(found), max(count, *optimizers, 0), name)
    return [found[data] for data in sorted(found)]


def _zero_sources(
    directory: DeepSpeedDirectory, model_rank: int, contents: Sequence[Mapping[str, Any]]
) -> list[_Source]:
    """Return the partitions of one model-parallel rank; none without ZeRO or its files.

    Raises:
        CheckpointError: Files of some ranks are missing; with ZeRO-3, of all ranks.
    """
    shapes = _shapes(directory.path, contents[0].get("param_shapes"))
    if not shapes or not (directory.optimizers or directory.partitions):
        return []
    files = {
        data: path for (data, rank), path in directory.optimizers.items() if rank == model_rank
    }
    name = _OPTIMIZER % model_rank
    states = {data: optimizer_state(path) for data, path in files.items()}
    if files:
        count = partition_count(files[min(files)], states[min(files)])
    else:
        saved = contents[0].get("dp_world_size")
        count = saved if type(saved) is int and 0 < saved < _MAX_RANKS else 1
    require_ranks(directory.path, "data parallelism", set(files), count, name)
    return [_Zero(files[0], Partitions(files, states, shapes))]


def _frozen_sources(path: Path, contents: Sequence[Mapping[str, Any]]) -> list[_Source]:
    shapes = _shapes(path, [contents[0].get("frozen_param_shapes") or {}])
    fragments = [_fragments(path, content.get("frozen_param_fragments")) for content in contents]
    saved = contents[0].get("buffer_names")
    buffers = saved if isinstance(saved, list) else []
    module = dict(flat_tensors(path, contents[0].get("module") or {}))
    held = {name: tensor for name, tensor in module.items() if name in buffers}
    return [_Frozen(path, shapes, fragments), _InFile(path, held)]


def _fragments(path: Path, saved: object) -> dict[str, Tensor]:
    """Return one rank's shares of the parameters that are not trained."""
    found = saved if isinstance(saved, dict) else {}
    if not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"`{path}` is damaged", why="its frozen parameters are no tensors")
    return found


def _shapes(path: Path, saved: object) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters of each group; older versions have one group."""
    groups = [saved] if isinstance(saved, dict) else saved or []
    found = []
    for group in groups if isinstance(groups, list | tuple) else [None]:
        valid = isinstance(group, dict) and all(
            isinstance(shape, tuple | list)
            and len(shape) <= _MAX_DIMS
            and all(type(size) is int and size > 0 for size in shape)
            for shape in group.values()
        )
        if not isinstance(group, dict) or not valid:
            raise CheckpointError(f"`{path}` is damaged", why="its `param_shapes` are no shapes")
        found.append({str(name): tuple(shape) for name, shape in group.items()})
    return found


def _stored(tensor: Tensor, path: Path) -> StoredTensor:
    dtype = tensor.dtype if tensor.dtype in _FLOATS else None
    return StoredTensor(dtype, tuple(tensor.shape), path)
