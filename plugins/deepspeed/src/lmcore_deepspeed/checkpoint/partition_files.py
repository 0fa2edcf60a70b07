"""Files of ZeRO's partitions of one model-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lmcore_deepspeed.checkpoint.directory import DeepSpeedDirectory, require_ranks
from lmcore_deepspeed.checkpoint.sources import Source, Zero
from lmcore_deepspeed.checkpoint.without_zero import mapped_shapes
from lmcore_deepspeed.checkpoint.zero import (
    Partitions,
    Shapes,
    optimizer_state,
    partition_count,
)

__all__ = ["zero_sources"]

_OPTIMIZER = "zero_pp_rank_{}_mp_rank_%02d_optim_states.pt"
_ANY_PREFIX = "[bf16_]"
_MAX_RANKS = 2**20


def zero_sources(
    directory: DeepSpeedDirectory,
    model_rank: int,
    shapes: Shapes,
    named: Mapping[str, Tensor],
    saved_count: object,
    *,
    weights_only: bool,
) -> list[Source]:
    """Return the partitions of one model-parallel rank; none without ZeRO or its files.

    Args:
        directory: Files of the checkpoint.
        model_rank: Number of the rank.
        shapes: Shapes of its parameters; empty if its file has none, such as for a pipeline in
            bfloat16 without ZeRO, whose partitions have the names.
        named: Weights of the model by the names that the optimizer has for them.
        saved_count: Number of data-parallel ranks, if the rank's file has it.
        weights_only: True to leave the state of Adam out.

    Raises:
        CheckpointError: Files of some ranks are missing; with ZeRO-3, of all ranks.
    """
    if not (directory.optimizers or (directory.partitions and shapes)):
        return []
    files = {
        data: path for (data, rank), path in directory.optimizers.items() if rank == model_rank
    }
    states = {
        data: optimizer_state(path, compare=directory.compare) for data, path in files.items()
    }
    if not shapes:
        shapes = mapped_shapes(states.values(), named)
    if not shapes:
        return []
    known = files or directory.optimizers
    first = next(iter(known.values())).name if known else _ANY_PREFIX + _OPTIMIZER
    name = first[: first.index("zero_pp_rank_")] + _OPTIMIZER % model_rank
    if files:
        count = partition_count(files[min(files)], states[min(files)])
    else:
        valid = type(saved_count) is int and 0 < saved_count < _MAX_RANKS
        count = saved_count if type(saved_count) is int and valid else 1
    require_ranks(directory.path, "data parallelism", set(files), count, name)
    return [Zero(files[0], Partitions(files, states, shapes, weights_only=weights_only))]
