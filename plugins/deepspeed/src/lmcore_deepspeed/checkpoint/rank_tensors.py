"""Tensors of one rank of tensor parallelism, from all kinds of files.

Weights in float32 are in ZeRO's partitions; weights that these lack are in the module's, or in the
layer files of a pipeline, in the precision in which the model computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError
from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.huggingface.weights import StoredTensor
from lmcore.conversion.megatron.rank_files.rank_file import flat_tensors
from lmcore.conversion.state import WEIGHT, OptimizerStateError
from lmcore.conversion.unread import same_values
from lmcore_deepspeed.checkpoint.directory import (
    DeepSpeedDirectory,
    require_one_step,
    require_ranks,
)
from lmcore_deepspeed.checkpoint.names import legacy_names
from lmcore_deepspeed.checkpoint.partition_files import zero_sources
from lmcore_deepspeed.checkpoint.sources import Frozen, InFile, Source, Universal, Zero
from lmcore_deepspeed.checkpoint.without_zero import (
    Held,
    Unread,
    WithoutZero,
    optimizer_names,
    optimizer_sources,
    parameters_in,
)
from lmcore_deepspeed.checkpoint.zero import (
    ADAM_HINT,
    Shapes,
)

__all__ = ["RankTensors", "open_ranks", "universal_tensors"]

_MAX_DIMS = 8
_POSITIONS = "position_embeddings.weight"


class RankTensors:
    """Tensors of one rank of tensor parallelism, by their names in the module.

    Attributes:
        tensors: Dtype, shape and file of each tensor.
        aliases: Name of the original of each shared parameter, by its name in the module.
        notes: Notes about tensors that are not read, for the user.
        step: Number of updates by the optimizer; None if it is not known.
        settings: Settings of Adam, with the names of `Progress.adam`; empty if not known.
        loss_scale: Loss scale, with the names of `Progress.loss_scale`; None without one.
        optimizers: State of the optimizer of each model-parallel rank.
        without_adam: Reason for which there is no state of Adam; None if there is, or if it is
            not read.
    """

    def __init__(self, sources: Sequence[Source], aliases: Mapping[str, str]) -> None:
        """Combine *sources*; the first one that has a tensor is read, the others are compared."""
        self._sources: dict[str, Source] = {}
        self._copies: dict[str, list[tuple[Source, str]]] = {}
        self.notes: list[str] = []
        self.tensors: dict[str, StoredTensor] = {}
        # A tied embedding has one name in ZeRO's partitions and another in its layer's file.
        common = legacy_names({name for source in sources for name in source.tensors})
        first: dict[str, str] = {}
        for source in sources:
            for name, tensor in source.tensors.items():
                same = first.setdefault(common[name], name)
                if name not in self.tensors:
                    self.tensors[name], self._sources[name] = tensor, source
                if self._sources[same] is source or 0 in tensor.shape:
                    continue  # ZeRO-3 leaves empty tensors in the place of parameters
                if not isinstance(source, InFile) and name.endswith(_POSITIONS):
                    where = f"`{name}` of the last stage of the pipeline, in `{tensor.file.name}`"
                    self.notes.append(f"not read: {where}, which has no use there")
                    continue
                self._copies.setdefault(same, []).append((source, name))
        for alias, name in aliases.items():
            if name in self.tensors:
                held = self._sources.get(alias)
                if held is not None and 0 not in self.tensors[alias].shape:
                    self._copies.setdefault(name, []).append((held, alias))
                self.tensors[alias], self._sources[alias] = (
                    self.tensors[name],
                    self._sources[name],
                )
        self.aliases = {alias: name for alias, name in aliases.items() if name in self.tensors}
        self.step = next((one.step for one in sources if one.step is not None), None)
        self.settings = next((one.settings for one in sources if one.settings), {})
        self.loss_scale = next((one.loss_scale for one in sources if one.loss_scale), None)
        self.optimizers = [one for one in sources if isinstance(one, Zero | WithoutZero | Unread)]
        self.without_adam = next((one.without_adam for one in sources if one.without_adam), None)

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
        for source, inside in self._copies.get(stored, ()):
            if kind not in source.kinds:
                continue
            copy = source.read(inside, kind)
            if not same_values(found.to(copy.dtype), copy):
                path, file = self.tensors[name].file.parent, source.tensors[inside].file.name
                what = "the float32 weights" if kind == WEIGHT else f"`{kind}`"
                raise OptimizerStateError(
                    f"the optimizer's files in `{path}` do not fit the model's",
                    why=f"{what} of `{name}` are not the ones of `{inside}` in `{file}`",
                    hint="copy the files of all ranks again, of one checkpoint, or take the "
                    "model's weights: `lmcore checkpoint convert --weights-only`",
                )
        return found


def universal_tensors(
    files: DeepSpeedDirectory,
    directory: Path,
    content: Mapping[str, Any],
    *,
    weights_only: bool = False,
) -> RankTensors:
    """Return the tensors of a universal checkpoint, joined over all ranks.

    Args:
        files: Files of the checkpoint.
        directory: Its directory `zero`.
        content: Content of the first rank's model file.
        weights_only: True to leave the state of Adam out.

    Raises:
        CheckpointError: A file is damaged, or the optimizer has done more updates than the model's
            run has done steps.
    """
    groups = _shapes(directory, content.get("param_shapes"))
    shapes = {name: shape for group in groups for name, shape in group.items()}
    source = Universal(directory, shapes, weights_only=weights_only, compare=files.compare)
    _require_no_later_step(files, content, source.steps())
    return RankTensors([source], _aliases(content))


def _require_no_later_step(
    files: DeepSpeedDirectory, content: Mapping[str, Any], steps: Mapping[str, int]
) -> None:
    """Raise a `CheckpointError` if a universal part is of a later step than the model's file.

    Fewer updates than steps are no error, as float16 skips updates whose gradients overflow.
    """
    counts = [content.get(name) for name in ("iteration", "global_steps")]
    done = max((count for count in counts if type(count) is int), default=None)
    for file, step in steps.items():
        if done is not None and step > done:
            raise CheckpointError(
                f"`{files.path}` is mixed from several checkpoints",
                why=f"`{file}` is of step {step}, `{files.first.name}` of step {done}",
                hint="copy all files of one checkpoint",
            )


def open_ranks(
    files: DeepSpeedDirectory,
    content: Mapping[str, Any],
    tensor_size: int,
    size: int,
    *,
    weights_only: bool = False,
) -> list[RankTensors]:
    """Return the tensors of all ranks of tensor parallelism.

    Args:
        files: Files of the checkpoint.
        content: Content of the first rank's model file.
        tensor_size: Number of ranks of tensor parallelism.
        size: Number of model-parallel ranks: stages times ranks of tensor parallelism.
        weights_only: True to leave the state of Adam out.

    Raises:
        CheckpointError: Files are missing or damaged, or do not belong together.
    """
    if files.models and files.partitions and not _have_shapes(files):
        # Beside a universal checkpoint, which is gone, they have the counters alone.
        files = dataclasses.replace(files, partitions={})
    found = set(files.models) | {rank for _, rank in files.partitions}
    if files.models and files.partitions:
        raise CheckpointError(
            f"`{files.path}` has files of two checkpoints",
            why="some model files are of ZeRO-3, others are not",
        )
    name = "mp_rank_{:02d}_model_states.pt"
    if files.partitions:
        name = f"zero_pp_rank_0_{name}"
    require_ranks(files.path, "model parallelism", found, size, name)
    for layer in sorted({number for number, _ in files.layers}):
        owners = {owner for number, owner in files.layers if number == layer}
        file = f"layer_{layer:02d}-model_{{:02d}}-model_states.pt"
        require_ranks(
            files.path, "tensor parallelism", owners, tensor_size, file, f" of layer {layer}"
        )
    stray = sorted({rank for _, rank in files.optimizers} - set(range(size)))
    if stray:
        raise CheckpointError(
            f"`{files.path}` has files of two checkpoints",
            why=f"there are {size} model-parallel ranks, and files of the optimizer of rank "
            f"{stray[0]}",
        )
    ranks = [
        _open_rank(files, content, rank, tensor_size, size, weights_only=weights_only)
        for rank in range(tensor_size)
    ]
    optimizers = [one for rank in ranks for one in rank.optimizers]
    lacking = [one.path for one in optimizers if one.without_adam]
    if not files.optimizers and optimizers:
        there = {one.path for one in optimizers}
        lacking += [path for path in files.models.values() if path not in there]
    if lacking and len({one.path for one in optimizers} - set(lacking)) > 0:
        raise OptimizerStateError(
            f"`{lacking[0]}` lacks the state of Adam",
            why="the files of other model-parallel ranks have it",
            hint=ADAM_HINT,
        )
    require_one_step({one.path: one.step for one in optimizers})
    return ranks


def _have_shapes(files: DeepSpeedDirectory) -> bool:
    """Return True if a model's file of ZeRO-3 has shapes of parameters, as DeepSpeed's own have."""
    contents = (load_content(path, compare=files.compare) for path in files.partitions.values())
    return any(content.get("param_shapes") for content in contents)


def _open_rank(
    directory: DeepSpeedDirectory,
    content: Mapping[str, Any],
    rank: int,
    tensor_size: int,
    size: int,
    *,
    weights_only: bool,
) -> RankTensors:
    """Return the tensors of one rank of tensor parallelism, over all stages of a pipeline.

    Args:
        directory: Files of the checkpoint.
        content: Content of the first rank's model file.
        rank: Rank of tensor parallelism.
        tensor_size: Number of ranks of tensor parallelism.
        size: Number of model-parallel ranks: stages times ranks of tensor parallelism.
        weights_only: True to leave the state of Adam out.

    Raises:
        CheckpointError: Files are missing or damaged, or do not belong together.
    """
    zero: list[Source] = []
    frozen: list[Source] = []
    modules: list[Source] = []
    counts: list[object] = []
    saved: list[tuple[Path, object]] = []
    described: list[tuple[int, Shapes]] = []
    held: list[Held] = []
    aliases: dict[str, str] = {}
    for model_rank in range(rank, size, tensor_size):
        paths = _model_files(directory, model_rank)
        contents = [
            content if path == directory.first else load_content(path, compare=directory.compare)
            for path in paths
        ]
        steps = {path: _step(one) for path, one in zip(paths, contents, strict=True)}
        require_one_step({directory.first: _step(content), **steps})
        first = contents[0]
        described.append((model_rank, _shapes(directory.path, first.get("param_shapes"))))
        counts.append(first.get("dp_world_size"))
        if directory.partitions:
            frozen += _frozen_sources(paths, contents)
        elif first.get("module") is not None:
            tensors = flat_tensors(paths[0], first["module"])
            modules.append(InFile(paths[0], dict(tensors)))
            held.append(parameters_in(tensors, first.get("buffer_names")))
        saved.append((paths[0], first.get("optimizer")))
        aliases |= _aliases(first)
    for (layer, owner), path in sorted(directory.layers.items()):
        if owner == rank:
            tensors = flat_tensors(path, load_content(path, compare=directory.compare))
            numbered = [(f"{layer}.{name}", one) for name, one in tensors]
            modules.append(InFile(path, dict(numbered)))
            held.append(parameters_in(numbered, None))
    if not (directory.partitions or directory.optimizers or weights_only):
        zero += optimizer_sources(saved, held, pipeline=bool(directory.layers))
    named = dict(optimizer_names(held))
    for (model_rank, shapes), count in zip(described, counts, strict=True):
        zero += zero_sources(directory, model_rank, shapes, named, count, weights_only=weights_only)
    return RankTensors([*zero, *frozen, *modules], aliases)


def _step(content: Mapping[str, Any]) -> object:
    """Return the number of steps that a model's file states; None without one."""
    return content.get("iteration", content.get("global_steps"))


def _aliases(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the original of each shared parameter."""
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


def _frozen_sources(paths: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> list[Source]:
    """Return what the files of a model's data-parallel ranks with ZeRO-3 have beside partitions."""
    first = contents[0]
    shapes = _shapes(paths[0], [first.get("frozen_param_shapes") or {}])
    fragments = [_fragments(paths[0], one.get("frozen_param_fragments")) for one in contents]
    found: list[Source] = [Frozen(paths[0], shapes, fragments)]
    for path, content in zip(paths, contents, strict=True):
        saved = content.get("buffer_names")
        buffers = saved if isinstance(saved, list) else []
        module = dict(flat_tensors(path, content.get("module") or {}))
        # Parameters that every rank keeps whole are not empty there, and are compared.
        held = {name: one for name, one in module.items() if name in buffers or one.numel()}
        found.append(InFile(path, held))
    return found


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
