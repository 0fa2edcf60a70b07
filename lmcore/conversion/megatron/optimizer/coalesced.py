"""Buffers of the distributed optimizer, collected from all data-parallel ranks.

For each part of the model there are flat float32 buffers of the main parameters and of both
moments.  Parameters are in the reverse of the model's order, each from a multiple of 64 on.  A
buffer consists of buckets, whose sizes are not saved, and in each the multiples count from its
start, which directly follows the bucket before.  If a parameter can be in two places, the weights
of the model decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmcore.conversion.megatron.optimizer.moments import UnreadOptimizer
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError

__all__ = ["ALIGNMENT", "coalesced_buffers", "starts_in"]

ALIGNMENT = 64
"""Number of elements that divides the start of every parameter in a bucket."""
_TRIES = 1000
"""Number of wrong places after which the buffers are refused."""
_KEYS = {"param": WEIGHT, **{kind: kind for kind in ADAM}}


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
            aligned = bucket - (bucket - end) // ALIGNMENT * ALIGNMENT
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
