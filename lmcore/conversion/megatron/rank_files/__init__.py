"""Megatron's `torch` format, a file for each model-parallel rank, read and written."""

from lmcore.conversion.megatron.directory import checkpoints_at, incomplete_megatron, is_megatron
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["FORMAT"]

FORMAT = CheckpointFormat(
    name="megatron",
    title="Megatron-LM",
    described="a checkpoint of Megatron-LM",
    matches=is_megatron,
    read="lmcore.conversion.megatron.rank_files.read:MegatronState",
    write="lmcore.conversion.megatron.rank_files.write:write_megatron",
    options=("layout",),
    styles=STYLES,
    optimizer=True,
    checkpoints=checkpoints_at,
    lacks=incomplete_megatron,
    files="`mp_rank_XX/model_optim_rng.pt`, in it or in `iter_XXXXXXX` or `release` inside",
)
