"""State of Megatron's distributed optimizer beside a rank file, `distrib_optim.pt`.

For each part of the model the file has flat float32 buffers of the main parameters and of both
moments, collected from all data-parallel ranks.  Parameters are in the reverse of the model's
order, each from a multiple of 64 on.  A buffer consists of buckets, whose sizes the file does not
have, and in each the multiples count from its start, which directly follows the bucket before.
So if there are two places for a parameter, the weights of the model decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.megatron.moments import Moments, UnreadOptimizer, group_values
from lmcore.conversion.megatron.rank_file import Part, RankFile
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError

__all__ = ["coalesced_buffers", "read_distributed", "starts_in"]

_NAME = "distrib_optim.pt"
_ALIGNMENT = 64
_TRIES = 1000
"""Number of wrong places after which the buffers are refused."""
_KEYS = {"param": WEIGHT, **{kind: kind for kind in ADAM}}


def read_distributed(rank: RankFile, content: Mapping[str, Any]) -> Moments:
    """Return the state of a distributed Adam of one rank.

    Args:
        rank: File of the rank.
        content: Value of `optimizer` in it, which has the groups.

    Raises:
        UnreadOptimizer: There is no file with the state, or it is of another version.
        OptimizerStateError: The state does not fit the model.
        CheckpointError: The file is damaged.
    """
    path = rank.path.with_name(_NAME)
    if not path.is_file():
        raise UnreadOptimizer(f"it was distributed, and there is no `{_NAME}`")
    saved: Mapping[Any, Any] = load_content(path, compare=rank.compare)
    if not saved.get("buckets_coalesced"):
        raise UnreadOptimizer("it was distributed by a version of Megatron before 2024")
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in (WEIGHT, *ADAM)}
    for number, part in enumerate(rank.parts):
        buffers = coalesced_buffers(path, saved.get(number))
        for kind, found in _parameters(path, part, buffers).items():
            tensors[kind] += found
    if len(rank.parts) in saved:
        raise UnreadOptimizer("it has several buffers for one part of the model")
    step, settings = group_values(content)
    return Moments(tensors, step, settings)


def coalesced_buffers(path: Path, saved: object) -> dict[str, Tensor]:
    """Return the buffer of each kind of one part of the model.

    Args:
        path: File with the buffers, for messages.
        saved: Content for the part.

    Raises:
        UnreadOptimizer: There are several buffers.
        OptimizerStateError: A buffer is missing or damaged.
    """
    if not isinstance(saved, dict) or len(saved) != 1:
        raise UnreadOptimizer("it has several buffers for one part of the model")
    (held,) = saved.values()
    found = {}
    for key, kind in _KEYS.items():
        buffer = held.get(key) if isinstance(held, dict) else None
        if not isinstance(buffer, Tensor) or buffer.ndim != 1:
            raise _unfit(path, f"its buffer `{key}` is no vector")
        found[kind] = buffer
    if len({buffer.numel() for buffer in found.values()}) != 1:
        raise _unfit(path, "its buffers have different sizes")
    return found


def _parameters(path: Path, part: Part, buffers: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the state of each parameter of one part, in the order of the file."""
    starts = starts_in(path, part.order, buffers[WEIGHT])
    sizes = [weight.shape for _, weight in part.order]
    return {
        kind: [
            buffer[start : start + size.numel()].view(size)
            for start, size in zip(starts, sizes, strict=True)
        ]
        for kind, buffer in buffers.items()
    }


def starts_in(path: Path, parameters: Sequence[tuple[str, Tensor]], main: Tensor) -> Sequence[int]:
    """Return the first element of each parameter in a buffer, in the order of the parameters.

    Args:
        path: File with the buffer, for messages.
        parameters: Names and weights of a part of the model, in its order.
        main: Buffer of the main parameters.

    Raises:
        OptimizerStateError: The parameters are not in the buffer.
    """
    order = parameters[::-1]
    starts: list[int] = []
    bucket, end, furthest = 0, 0, 0
    others: list[tuple[int, int]] = []  # place and number of parameters before it, to go back to
    tries = _TRIES + 2 * len(order)
    while len(starts) < len(order) or end != main.numel():
        tries -= 1
        places: list[int] = []
        if len(starts) < len(order):
            furthest = max(furthest, len(starts))
            aligned = bucket - (bucket - end) // _ALIGNMENT * _ALIGNMENT
            # With one place only, the comparison waits until the parameter is read.
            places = [end]
            if aligned != end:
                weight = order[len(starts)][1]
                places = [one for one in (aligned, end) if _is_at(main, one, weight)]
        others += [(one, len(starts)) for one in places[1:]]
        if places:
            start = places[0]
        elif others and tries > 0:
            start, count = others.pop()
            del starts[count:]
            bucket = start
        else:
            raise _unfit(path, f"the main parameter of `{order[furthest][0]}` is not in its place")
        bucket = start if start == end else bucket
        starts.append(start)
        end = start + order[len(starts) - 1][1].numel()
    return starts[::-1]


def _is_at(main: Tensor, start: int, weight: Tensor) -> bool:
    """Return True if the main parameter of *weight* begins at *start*."""
    held = main[start : start + weight.numel()]
    if held.numel() != weight.numel():
        return False
    return torch.equal(held.to(weight.dtype), weight.reshape(-1))


def _unfit(path: Path, why: str) -> OptimizerStateError:
    return OptimizerStateError(
        f"the optimizer's state in `{path}` does not fit the model",
        why=why,
        hint="copy the directories of all ranks again, or take the weights without it: "
        "`lmcore checkpoint convert --weights-only`",
    )
