"""Megatron's `torch_dist` format, a distributed checkpoint of torch, read and written."""

from lmcore.conversion.megatron.directory import (
    COMMON_NAME,
    FORMAT_NAME,
    checkpoints_at,
    is_megatron_dist,
)
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["FORMAT"]

FORMAT = CheckpointFormat(
    name="megatron-dist",
    title="Megatron-LM (torch_dist)",
    described="a checkpoint of Megatron-LM",
    matches=is_megatron_dist,
    read="lmcore.conversion.megatron.torch_dist.read:DistributedState",
    write="lmcore.conversion.megatron.torch_dist.write:write_distributed",
    options=("layout",),
    styles=STYLES,
    optimizer=True,
    checkpoints=checkpoints_at,
    files=f"`{COMMON_NAME}` with `{FORMAT_NAME}`, in it or in `iter_XXXXXXX` or `release` inside",
)
