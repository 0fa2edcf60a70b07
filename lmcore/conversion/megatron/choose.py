"""Choice between Megatron's two formats."""

from __future__ import annotations

from pathlib import Path

from lmcore.conversion.megatron.directory import find_checkpoint, is_distributed
from lmcore.conversion.megatron.distributed_read import DistributedState
from lmcore.conversion.megatron.read import MegatronState

__all__ = ["read_megatron"]


def read_megatron(path: Path) -> MegatronState | DistributedState:
    """Return the state of a checkpoint: rank files, or `torch_dist`.

    Args:
        path: Directory that Megatron saved to, or one checkpoint in it.

    Raises:
        CheckpointError: See the two classes.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is not None and is_distributed(checkpoint):
        return DistributedState(path)
    return MegatronState(path)
