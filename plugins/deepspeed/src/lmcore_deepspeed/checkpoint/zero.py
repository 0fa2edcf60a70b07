"""ZeRO's partitions of the optimizer, joined to weights in float32 and states of Adam.

Each data-parallel rank has, for each group of parameters, a flat vector of the weights and one of
each state; a parameter is a list of pieces of these vectors.

stage | pieces of a parameter with n elements over D ranks
--- | ---
1, 2 | the group's parameters in a row, divided into D vectors; `param_slice_mappings` has each \
rank's piece, files of older versions only the order (`param_shapes`)
3 | ceil(n / D) elements of each rank, the last ones padding
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.conversion.foreign_pickle.records import load_content, values_of
from lmcore.conversion.megatron.optimizer.groups import group_values, step_of
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError
from lmcore_deepspeed.checkpoint.directory import require_one_step
from lmcore_deepspeed.checkpoint.loss_scaler import deepspeed_loss_scale

__all__ = [
    "ADAM_HINT",
    "Partitions",
    "Shapes",
    "join_pieces",
    "optimizer_state",
    "partition_count",
    "saved_step",
]

Shape = tuple[int, ...]
Shapes = Sequence[Mapping[str, Shape]]
"""Shapes of the parameters of each group, by name, in the order of the flat vectors."""

_FP32, _FP32_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_HINT = "copy the files of all ranks again"
ADAM_HINT = f"{_HINT}, or take the weights: `lmcore checkpoint convert --weights-only`"
"""Hint of an error for a state of Adam that is not complete."""


@dataclass(frozen=True)
class _Piece:
    """Range of a flat vector: rank, group, first element and number of elements."""

    rank: int
    group: int
    start: int
    numel: int


class Partitions:
    """Weights and states of Adam of one model-parallel rank, in the files of its data ranks.

    Attributes:
        shapes: Shape of each parameter by its name in the module.
        kinds: Kinds of tensors of every parameter.
        step: Number of updates by the optimizer; None if it is not known.
        settings: Settings of Adam, with the names of `Progress.adam`; empty if not known.
        loss_scale: Loss scale, with the names of `Progress.loss_scale`; None without one.
        without_adam: Reason for which there is no state of Adam; None if there is, or if it is
            not read.
    """

    def __init__(
        self,
        files: Mapping[int, Path],
        states: Mapping[int, Mapping[str, Any]],
        shapes: Shapes,
        *,
        weights_only: bool = False,
    ) -> None:
        """Find the pieces of every parameter.

        Args:
            files: File of each data-parallel rank.
            states: Optimizer's state in each file; see `optimizer_state`.
            shapes: Shapes of the parameters of each group.
            weights_only: True to leave the state of Adam out.

        Raises:
            CheckpointError: A file is damaged, does not have the parameters of *shapes*, or lacks
                a state of Adam that another one has.
        """
        self._paths = [files[rank] for rank in sorted(files)]
        self._states = [states[rank] for rank in sorted(files)]
        steps = [saved_step(state) for state in self._states]
        require_one_step(dict(zip(self._paths, steps, strict=True)))
        self.shapes = {name: shape for group in shapes for name, shape in group.items()}
        key = _FP32_STAGE_3 if _FP32_STAGE_3 in self._states[0] else _FP32
        self._vectors = {
            WEIGHT: [
                _vectors(path, state.get(key), key)
                for path, state in zip(self._paths, self._states, strict=True)
            ]
        }
        groups = {len(vectors) for vectors in self._vectors[WEIGHT]}
        if len(groups) != 1:
            raise self._damaged(f"its ranks have {sorted(groups)} groups of parameters")
        self.step = steps[0]
        self.settings: Mapping[str, float] = {}
        self.loss_scale: Mapping[str, float] | None = None
        self.without_adam: str | None = None
        self._pieces: dict[str, list[_Piece]] = {}
        if key == _FP32_STAGE_3:
            self._find_stage_3(shapes)
        elif self._states[0].get("param_slice_mappings"):
            self._find_mapped()
        else:
            self._find_in_order(shapes)
        if not weights_only:
            self._read_adam()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of tensors of every parameter."""
        return tuple(self._vectors)

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        piece = self._pieces[name][0]
        return self._vectors[kind][piece.rank][piece.group].dtype

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor.

        Args:
            name: Name of the parameter in the module.
            kind: Kind of tensor, one of `kinds`.
        """
        return join_pieces(
            (self._vectors[kind][one.rank][one.group].narrow(0, one.start, one.numel))
            for one in self._pieces[name]
        )[: math.prod(self.shapes[name])].view(self.shapes[name])

    def _read_adam(self) -> None:
        """Add the states of Adam, which every rank has for every group, or none has."""
        ranks = [_adam_states(state) for state in self._states]
        held = [{key for group in groups for key in group} for groups in ranks]
        lacking = [rank for rank, keys in enumerate(held) if not keys & set(ADAM)]
        if len(lacking) == len(held):
            others = sorted(map(str, set().union(*held) - {"step"}))
            names = ", ".join(f"`{key}`" for key in others)
            found_instead = f"{names} instead" if names else "no state of an optimizer"
            self.without_adam = f"ZeRO's partitions have {found_instead}"
            return
        if lacking:
            raise OptimizerStateError(
                f"`{self._paths[lacking[0]]}` lacks the state of Adam",
                why="the files of other data-parallel ranks have it",
                hint=ADAM_HINT,
            )
        found: dict[str, list[list[Tensor]]] = {kind: [] for kind in ADAM}
        for rank, groups in enumerate(ranks):
            weights = self._vectors[WEIGHT][rank]
            for kind in ADAM:
                vectors = [one for group in groups if (one := _vector(group.get(kind))) is not None]
                # Padding at the end is left out of the weights alone.
                if not len(groups) == len(vectors) == len(weights) or any(
                    one.numel() < other.numel() for one, other in zip(vectors, weights, strict=True)
                ):
                    raise OptimizerStateError(
                        f"`{self._paths[rank]}` does not fit the model",
                        why=f"its `{kind}` does not fit its groups of parameters",
                        hint=ADAM_HINT,
                    )
                found[kind].append(vectors)
        self.settings = group_values(_inner_optimizer(self._states[-1]))[1]
        self.loss_scale = deepspeed_loss_scale(self._states[0].get("loss_scaler"))
        self._vectors |= found

    def _find_mapped(self) -> None:
        """Find the pieces that each rank's `param_slice_mappings` states."""
        for rank, state in enumerate(self._states):
            mappings = state.get("param_slice_mappings")
            expected = len(self._vectors[WEIGHT][rank])
            listed = isinstance(mappings, list) and all(isinstance(one, dict) for one in mappings)
            if not isinstance(mappings, list) or not listed or len(mappings) != expected:
                raise self._damaged("its `param_slice_mappings` do not fit its groups", rank)
            for group, mapping in enumerate(mappings):
                for name, address in mapping.items():
                    place = values_of(address) or {}
                    start, numel = place.get("start"), place.get("numel")
                    if name not in self.shapes or type(start) is not int or type(numel) is not int:
                        raise self._damaged(f"its piece of `{name}` is not known", rank)
                    self._add(name, _Piece(rank, group, start, numel))
        self._require_whole()

    def _find_in_order(self, shapes: Shapes) -> None:
        """Divide the vectors of each group, rank after rank, in the saved order."""
        self._require_groups(shapes)
        ranks = len(self._paths)
        for group, names in enumerate(shapes):
            sizes = [vectors[group].numel() for vectors in self._vectors[WEIGHT]]
            position = 0
            for name, shape in names.items():
                for rank, start, numel in _ranges(sizes, position, math.prod(shape)):
                    self._add(name, _Piece(rank, group, start, numel))
                position += math.prod(shape)
            # Vectors are padded to a multiple of two elements for each rank.
            if not 0 <= sum(sizes) - position < 2 * ranks:
                raise self._damaged(
                    f"its vectors have {sum(sizes):,} elements, its parameters {position:,}"
                )
        self._require_whole()

    def _find_stage_3(self, shapes: Shapes) -> None:
        """Find each rank's share of each parameter, in the order of the parameters."""
        for rank, vectors in enumerate(self._vectors[WEIGHT]):
            sizes = [vector.numel() for vector in vectors]
            position = 0
            for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
                share = -(-math.prod(shape) // len(self._paths))
                for group, start, numel in _ranges(sizes, position, share):
                    self._add(name, _Piece(rank, group, start, numel))
                position += share
            if position != sum(sizes):
                raise self._damaged(
                    f"it has {sum(sizes):,} elements, its share of the parameters is {position:,}",
                    rank,
                )

    def _add(self, name: str, piece: _Piece) -> None:
        size = self._vectors[WEIGHT][piece.rank][piece.group].numel()
        if piece.start < 0 or piece.numel < 0 or piece.start + piece.numel > size:
            raise self._damaged(f"its piece of `{name}` is outside of its vector", piece.rank)
        self._pieces.setdefault(name, []).append(piece)

    def _require_whole(self) -> None:
        """Raise a `CheckpointError` if the pieces of a parameter are not all of it."""
        for name, shape in self.shapes.items():
            found = sum(piece.numel for piece in self._pieces.get(name, []))
            if found != math.prod(shape):
                raise self._damaged(
                    f"`{name}` has {math.prod(shape):,} elements, of which {found:,} are there"
                )

    def _require_groups(self, shapes: Shapes) -> None:
        found = len(self._vectors[WEIGHT][0])
        if found != len(shapes):
            raise self._damaged(
                f"it has {counted(found, 'group')} of parameters instead of {len(shapes)}"
            )

    def _damaged(self, why: str, rank: int = 0) -> CheckpointError:
        return CheckpointError(f"`{self._paths[rank]}` does not fit the model", why=why, hint=_HINT)


def join_pieces(pieces: Iterable[Tensor]) -> Tensor:
    """Return one vector of several, without a copy of a single one."""
    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat(found)


def optimizer_state(path: Path, *, compare: bool = True) -> Mapping[str, Any]:
    """Return the state of ZeRO's optimizer in one data-parallel rank's file.

    Args:
        path: Path of the file.
        compare: True to compare its checksums.

    Raises:
        CheckpointError: It is damaged, or has no partition of ZeRO.
    """
    state = load_content(path, compare=compare).get("optimizer_state_dict")
    if not isinstance(state, dict) or not (_FP32 in state or _FP32_STAGE_3 in state):
        raise CheckpointError(
            f"`{path}` has no partition of ZeRO",
            why=f"it lacks `{_FP32}` and `{_FP32_STAGE_3}`",
            hint="convert it with the program that wrote it",
        )
    return state


def partition_count(path: Path, state: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks, as one of their files says.

    Args:
        path: Path of the file, for messages.
        state: State of ZeRO's optimizer in it.

    Raises:
        CheckpointError: It lacks the number.
    """
    count = state.get("partition_count")
    # Some versions store it for each group of parameters.
    counts = count if isinstance(count, list) else [count]
    if not counts or not all(type(one) is int and one > 0 for one in counts):
        raise CheckpointError(f"`{path}` is damaged", why=f"`partition_count` is `{count}`")
    return int(max(counts))


def _vectors(path: Path, value: object, key: str) -> list[Tensor]:
    values = value if isinstance(value, list) else [value]
    vectors = [vector for one in values if (vector := _vector(one)) is not None]
    if not vectors or len(vectors) != len(values):
        raise CheckpointError(f"`{path}` is damaged", why=f"its `{key}` are no flat tensors")
    return vectors


def _vector(value: object) -> Tensor | None:
    """Return *value* if it is a vector of floating-point numbers; None otherwise."""
    vector = isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point()
    return value.detach() if isinstance(value, Tensor) and vector else None


def _adam_states(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of each group; torch's optimizers number them, elastic ones list them."""
    base = _inner_optimizer(state)
    if isinstance(base, list):
        return [group for group in base if isinstance(group, dict)]
    states = base.get("state") if isinstance(base, dict) else None
    if not isinstance(states, dict) or not all(type(key) is int for key in states):
        return []
    return [states[key] for key in sorted(states) if isinstance(states[key], dict)]


def _inner_optimizer(state: Mapping[str, Any]) -> object:
    """Return the state of the optimizer that ZeRO's own wraps."""
    return state.get("base_optimizer_state", state.get("optimizer_state_dict"))


def saved_step(state: Mapping[str, Any]) -> int | None:
    """Return the number of updates in an optimizer's state; None if it is not there."""
    steps = [step_of(group.get("step")) for group in _adam_states(state)]
    steps += [group_values(_inner_optimizer(state))[0]]
    steps += [step_of(state.get("base_optimizer_state_step"))]
    return next((step for step in steps if step is not None), None)


def _ranges(sizes: Sequence[int], position: int, numel: int) -> Iterable[tuple[int, int, int]]:
    """Yield index, start and length of the ranges of a row of vectors.

    Args:
        sizes: Sizes of the vectors.
        position: First element of the row.
        numel: Number of elements; fewer are found if the row is shorter.
    """
    begin = 0
    for index, size in enumerate(sizes):
        start, end = max(position, begin), min(position + numel, begin + size)
        if start < end:
            yield index, start - begin, end - start
        begin += size
