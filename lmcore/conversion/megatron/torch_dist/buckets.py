"""State of Adam in `torch_dist` as the distributed optimizer keeps it: `dp_reshardable`.

Each model-parallel rank has a buffer for each of its parts of the model, in buckets.  A bucket is a
vector of parameters, the last one of the model first, each from a multiple of 64 on; the next
bucket begins with a parameter that no longer fits.  The vectors have no names of parameters, so
the positions follow from the order in which the model makes them and from the buckets' sizes.
The layers of a part follow from its size, as parts are filled in the order of the pipeline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmcore.conversion.cast import FLOAT_DTYPES
from lmcore.conversion.megatron.optimizer.coalesced import ALIGNMENT
from lmcore.conversion.megatron.optimizer.groups import group_values
from lmcore.conversion.megatron.optimizer.loss_scale import megatron_loss_scale
from lmcore.conversion.megatron.optimizer.moments import is_rounded
from lmcore.conversion.megatron.parameters.layout import in_layers, outside_layers
from lmcore.conversion.megatron.parameters.names import EMBEDDING, TIED
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.torch_dist.stored_tensors import StoredTensors
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError
from lmcore.conversion.unread import same_values
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape

__all__ = ["GROUP", "BucketState", "Parameters", "Place", "has_buckets"]

GROUP = r"^((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\."
"""Beginning of the names in a distributed optimizer's state, with the model-parallel rank."""
_KEY = re.compile(GROUP + r"gbuf_idx_(\d+)\.dtype_\(.+\)\.bucket_idx_(\d+)\.param$")
_SETTINGS = re.compile(GROUP + r"optimizer/")
_SCALER = re.compile(GROUP + r"grad_scaler/")
_KINDS = {WEIGHT: "param", **{kind: kind for kind in ADAM}}

Parameters = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes on one rank, in the order of the model."""


@dataclass(frozen=True)
class Place:
    """Position of a parameter.

    Attributes:
        bucket: Name of the bucket's vectors without the kind.
        start: First element.
        shape: Shape on one rank.
    """

    bucket: str
    start: int
    shape: tuple[int, ...]


def has_buckets(stored: StoredTensors) -> bool:
    """Return True if the state of the optimizer is in buckets."""
    return any(_KEY.match(name) for name in stored.entries)


class BucketState:
    """State of Adam in buckets, by lmcore's names.

    Attributes:
        step: Number of updates; None if it is not stored.
        settings: Settings of Adam, with the names of `Progress.adam`.
        loss_scale: Loss scale, with the names of `Progress.loss_scale`; None without one.
    """

    def __init__(
        self,
        stored: StoredTensors,
        shape: ModelShape,
        args: Mapping[str, Any],
        weight_of: Callable[[str], Tensor],
    ) -> None:
        """Find the position of every parameter.

        Args:
            stored: Files of the checkpoint.
            shape: Shape of the model.
            args: Arguments of the run that wrote it.
            weight_of: Function that returns the weight of a parameter, as Megatron packs it in one
                process.

        Raises:
            OptimizerStateError: The buckets do not fit the model.
        """
        self._stored, self._shape, self._weight_of = stored, shape, weight_of
        buffers = self._buffers()
        size = args.get("tensor_model_parallel_size", 1)
        if type(size) is not int or size < 1 or len(buffers) % size:
            raise self._unfit(
                f"it has {len(buffers)} model-parallel ranks, and tensor parallelism `{size!s:.80}`"
            )
        self._packing = Packing(shape, size)
        stages = len(buffers) // size
        self._check_ranks(buffers)
        found = None
        for order in _orders(args):
            units = self._units(shape, order, stages)
            places = [self._places(buffers[rank::size], units) for rank in range(size)]
            # The first order is the arguments'; another one is taken if it alone fits.
            if all(places) and self._is_at(places, shape, weight_of):
                found = places
                break
            found = found or (places if all(places) else None)
        if found is None:
            raise self._unfit("the sizes of its buckets are not those of the model's parameters")
        self._ranks = found
        self.step, self.settings = self._settings()
        self.loss_scale = self._loss_scale()

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._stored.dtype(f"{self._ranks[0][name].bucket}.{_KINDS[kind]}")

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor of lmcore.

        Args:
            name: Name of the parameter.
            kind: Kind of tensor.

        Raises:
            CheckpointError: The file is damaged.
        """
        parts = [self._part(rank[name], kind) for rank in self._ranks]
        if name == EMBEDDING:
            copies = [self._part(rank[TIED], kind) for rank in self._ranks if TIED in rank]
            if not all(same_values(*pair) for pair in zip(copies, parts, strict=False)):
                raise self._unfit(
                    f"`{_KINDS[kind]}` of the tied output layer differs from the one of `{name}`"
                )
        return self._packing.join(name, parts)

    def replica_notes(self) -> list[str]:
        """Return notes that name parameters whose replicas on the ranks have different values."""
        names = [name for name in self._ranks[0] if name != TIED]
        whole = [name for name in names if self._packing.split_dim(name) is None]
        return [
            note
            for kind in _KINDS
            for note in self._packing.replica_notes(
                {name: [self._part(rank[name], kind) for rank in self._ranks] for name in whole},
                kind,
            )
        ]

    def _part(self, place: Place, kind: str) -> Tensor:
        count = math.prod(place.shape)
        name = f"{place.bucket}.{_KINDS[kind]}"
        return self._stored.read_range(name, place.start, count).view(place.shape)

    def _buffers(self) -> list[list[list[str]]]:
        """Return the buckets' names of each buffer of each model-parallel rank."""
        found: dict[int, dict[tuple[str, int], dict[int, str]]] = {}
        for name in self._stored.entries:
            match = _KEY.match(name)
            if match is not None:
                ranks = found.setdefault(int(match[2]), {})
                buffer = ranks.setdefault((match[1], int(match[3])), {})
                if int(match[4]) in buffer:
                    raise self._unfit(f"`{name}` is there in two dtypes")
                buffer[int(match[4])] = name.removesuffix(".param")
        self._require_ranks(found)
        return [
            [[buckets[i] for i in sorted(buckets)] for _, buckets in sorted(found[rank].items())]
            for rank in range(len(found))
        ]

    def _require_ranks(self, found: Mapping[int, object]) -> None:
        if found.keys() != set(range(len(found))):
            raise self._unfit(f"it has the model-parallel ranks {sorted(found)[:50]} only")

    def _require_parts(self, buffers: Sequence[Sequence[Sequence[str]]]) -> None:
        if len({len(rank) for rank in buffers}) != 1:
            raise self._unfit("its model-parallel ranks have different numbers of buffers")

    def _check_ranks(self, buffers: Sequence[Sequence[Sequence[str]]]) -> None:
        self._require_parts(buffers)
        for bucket in (name for rank in buffers for buffer in rank for name in buffer):
            shapes = set()
            for kind in _KINDS.values():
                entry = self._stored.entries.get(f"{bucket}.{kind}")
                if entry is None or self._stored.dtype(f"{bucket}.{kind}") not in FLOAT_DTYPES:
                    found = "is missing" if entry is None else f"has dtype {entry.dtype}"
                    raise self._unfit(f"`{bucket}.{kind}` {found}")
                shapes.add(entry.shape)
            if len(shapes) != 1 or len(shapes.pop()) != 1:
                raise self._unfit(f"the tensors of `{bucket}` are not vectors of one size")

    def _units(self, shape: ModelShape, order: str, stages: int) -> list[Parameters]:
        """Return the groups of parameters that no part divides, in the order of the model."""
        layers: dict[str, list[str]] = {}
        for _, names in in_layers(shape, order).values():
            for name in names:
                layers.setdefault(name.split(".")[1], []).append(name)
        before, after = outside_layers(shape, order, copy=shape.tied and stages > 1)
        # The last norm is a part of the layers' stack, the heads are not.
        norm = [name for name in after if name.startswith("final_norm")]
        heads = [name for name in after if name not in norm]
        return [
            [(name, self._packing.part_shape(EMBEDDING if name == TIED else name)) for name in unit]
            for unit in (before, *layers.values(), norm, heads)
            if unit
        ]

    def _places(
        self, ranks: Sequence[Sequence[Sequence[str]]], units: Sequence[Parameters]
    ) -> dict[str, Place]:
        """Return the positions of one rank of tensor parallelism; empty if the sizes do not fit.

        Args:
            ranks: Buckets of each buffer of each stage.
            units: Parameters of the whole model.
        """
        found: dict[str, Place] = {}
        first = 0
        for part in range(len(ranks[0])):
            for stage in ranks:
                sizes = [self._stored.entries[f"{one}.param"].shape[0] for one in stage[part]]
                filled = _fill(units[first:], sizes)
                if filled is None:
                    return {}
                count, positions = filled
                parameters = [one for unit in units[first : first + count] for one in unit]
                for (name, size), (bucket, start) in zip(parameters, positions, strict=True):
                    found[name] = Place(stage[part][bucket], start, size)
                first += count
        return found if first == len(units) else {}

    def _is_at(
        self,
        ranks: Sequence[Mapping[str, Place]],
        shape: ModelShape,
        weight_of: Callable[[str], Tensor],
    ) -> bool:
        """Return True if the main parameters of the first layer are in the places of an order."""
        whole = Packing(shape, 1)
        for name in self._packing_names(shape):
            main = self._packing.join(name, [self._part(rank[name], WEIGHT) for rank in ranks])
            if not is_rounded(main, whole.join(name, [weight_of(name)])):
                return False
        return True

    def _packing_names(self, shape: ModelShape) -> list[str]:
        return [name for name in parameter_shapes(shape) if name.startswith("blocks.0.")]

    def _settings(self) -> tuple[int | None, dict[str, float]]:
        for name in sorted(name for name in self._stored.objects if _SETTINGS.match(name)):
            content = self._stored.read_object(name)
            if isinstance(content, list) and len(content) == 1:
                (content,) = content
            step, settings = group_values(content)
            if step is not None:
                return step, settings
        return None, {}

    def _loss_scale(self) -> dict[str, float] | None:
        names = sorted(name for name in self._stored.objects if _SCALER.match(name))
        return megatron_loss_scale(self._stored.read_object(names[0])) if names else None

    def _unfit(self, why: str) -> OptimizerStateError:
        return OptimizerStateError(
            f"the optimizer's state in `{self._stored.path}` does not fit the model",
            why=why,
            hint="`lmcore checkpoint convert --weights-only` takes the weights without it",
        )


def _orders(args: Mapping[str, Any]) -> list[str]:
    """Return the orders of a layer's modules, the one that the arguments name first."""
    local = args.get("transformer_impl") == "local"
    return ["core-local", "core"] if local else ["core", "core-local"]


def _fill(
    units: Sequence[Parameters], sizes: Sequence[int]
) -> tuple[int, list[tuple[int, int]]] | None:
    """Return how many units make buckets of given sizes, and each parameter's bucket and start."""
    whole = sum(sizes)
    total = count = 0
    for number in range(len(units) + 1):
        if total <= whole <= total + ALIGNMENT * (count + len(sizes)):
            parameters = [one for unit in units[:number] for one in unit]
            positions = _positions([math.prod(shape) for _, shape in parameters], sizes)
            if positions is not None:
                return number, positions
        if number < len(units) and total <= whole:
            total += sum(math.prod(shape) for _, shape in units[number])
            count += len(units[number])
    return None


def _positions(counts: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return each parameter's bucket and start; None if the buckets are not filled exactly."""
    found: list[tuple[int, int]] = []
    bucket = end = 0
    for count in reversed(counts):
        start = _aligned(end)
        if found and bucket < len(sizes) and start + count > sizes[bucket]:
            # A parameter that has a bucket of its own follows the padding of the one before.
            if sizes[bucket] not in {end, start}:
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + count > sizes[bucket]:
            return None
        found.append((bucket, start))
        end = start + count
    complete = bucket == len(sizes) - 1 and sizes[bucket] in {end, _aligned(end)}
    return found[::-1] if complete or not (found or sizes) else None


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT
