"""State of Adam in `torch_dist` that the distributed optimizer gathered: `dp_zero_gather_scatter`.

The first data-parallel rank of each model-parallel rank has an object with the same buffers as
`distrib_optim.pt` beside a rank file: for each part of the model a vector of all parameters, whose
buckets have no sizes.  The weights of the model decide where a bucket begins.  The objects are
in memory as a whole, as they are in Megatron.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmcore.conversion.megatron.optimizer.coalesced import ALIGNMENT, coalesced_buffers, starts_in
from lmcore.conversion.megatron.optimizer.moments import UnreadOptimizer
from lmcore.conversion.megatron.parameters.names import EMBEDDING, TIED
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.torch_dist.buckets import GROUP, BucketState, Parameters, Place
from lmcore.conversion.megatron.torch_dist.stored_tensors import StoredTensors
from lmcore.conversion.state import WEIGHT, OptimizerStateError

__all__ = ["GatheredState", "has_gathered"]

_STATE = re.compile(GROUP + r"param_state/")


def has_gathered(stored: StoredTensors) -> bool:
    """Return True if the state of the optimizer is in objects of model-parallel ranks."""
    return any(_STATE.match(name) for name in stored.objects)


class GatheredState(BucketState):
    """State of Adam in gathered buffers, by lmcore's names; see `BucketState`.

    The buffer of a part of a model-parallel rank takes the place of a bucket.
    """

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._vectors[self._ranks[0][name].bucket][kind].dtype

    def _part(self, place: Place, kind: str) -> Tensor:
        vector = self._vectors[place.bucket][kind]
        return vector.narrow(0, place.start, math.prod(place.shape)).view(place.shape)

    def _buffers(self) -> list[list[list[str]]]:
        """Return the names of the buffers of each part of each model-parallel rank.

        Raises:
            UnreadOptimizer: The objects have another form.
            OptimizerStateError: A rank is missing, or a buffer is damaged.
        """
        self._vectors: dict[str, Mapping[str, Tensor]] = {}
        found: dict[int, list[list[str]]] = {}
        for name in sorted(self._stored.objects):
            if (match := _STATE.match(name)) is None:
                continue
            rank = int(match[2])
            if rank in found:
                raise UnreadOptimizer("the run had several optimizers")
            content = self._stored.read_object(name, large=True)
            parts = _parts(content)
            found[rank] = [[f"{rank}.{part}"] for part in range(len(parts))]
            for part, saved in enumerate(parts):
                self._vectors[f"{rank}.{part}"] = coalesced_buffers(self._stored.path, saved)
        self._require_ranks(found)
        return [found[rank] for rank in range(len(found))]

    def _check_ranks(self, buffers: Sequence[Sequence[Sequence[str]]]) -> None:
        self._require_parts(buffers)

    def _places(
        self, ranks: Sequence[Sequence[Sequence[str]]], units: Sequence[Parameters]
    ) -> dict[str, Place]:
        """Return the positions of one rank of tensor parallelism; empty if the sizes do not fit."""
        found: dict[str, Place] = {}
        first = 0
        for part in range(len(ranks[0])):
            for stage in ranks:
                [buffer] = stage[part]
                placed = self._placed(buffer, units[first:])
                if placed is None:
                    return {}
                count, places = placed
                found |= places
                first += count
        return found if first == len(units) else {}

    def _placed(
        self, buffer: str, units: Sequence[Parameters]
    ) -> tuple[int, dict[str, Place]] | None:
        """Return how many units a buffer has, and the positions of their parameters."""
        main = self._vectors[buffer][WEIGHT]
        rank = int(buffer.partition(".")[0]) % self._packing.ranks
        total = 0
        parameters: list[tuple[str, tuple[int, ...]]] = []
        for count, unit in enumerate(units, 1):
            parameters += unit
            total += sum(math.prod(shape) for _, shape in unit)
            if total > main.numel():
                return None
            if main.numel() > total + ALIGNMENT * (len(parameters) + 1):
                continue
            order = [(name, self._weight_on(rank, name)) for name, _ in parameters]
            try:
                starts = starts_in(self._stored.path, order, main)
            except OptimizerStateError:
                continue
            return count, {
                name: Place(buffer, start, shape)
                for (name, shape), start in zip(parameters, starts, strict=True)
            }
        return None

    def _weight_on(self, rank: int, name: str) -> Tensor:
        """Return the model's weight on a rank of tensor parallelism."""
        name = EMBEDDING if name == TIED else name
        whole = Packing(self._shape, 1).join(name, [self._weight_of(name)])
        return self._packing.split(name, whole)[rank]


def _parts(content: Any) -> list[Any]:
    """Return the content of an object for each part of the model."""
    if isinstance(content, list) and len(content) == 1:
        (content,) = content
    if not isinstance(content, dict) or not content.get("buckets_coalesced"):
        raise UnreadOptimizer("it was distributed by a version of Megatron before 2024")
    numbers = sorted(key for key in content if type(key) is int)
    return [content[number] for number in numbers]
