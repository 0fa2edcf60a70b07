"""State of Megatron's distributed optimizer beside a rank file, in `distrib_optim.pt`.

The file has the buffers of `lmcore.conversion.megatron.optimizer.coalesced` for each part of the
model on the rank; the groups with the settings are in the rank file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.megatron.optimizer.coalesced import coalesced_buffers, starts_in
from lmcore.conversion.megatron.optimizer.groups import group_values
from lmcore.conversion.megatron.optimizer.moments import Moments, UnreadOptimizer
from lmcore.conversion.megatron.rank_files.rank_file import Part, RankFile
from lmcore.conversion.state import ADAM, WEIGHT

__all__ = ["read_distributed"]

_NAME = "distrib_optim.pt"


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
