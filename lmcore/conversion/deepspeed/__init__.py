"""Checkpoints of DeepSpeed's engine: of Megatron-DeepSpeed, and of models of transformers."""

from lmcore.conversion.deepspeed.directory import checkpoints_at, is_deepspeed
from lmcore.conversion.deepspeed.names import STYLES
from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["FORMAT"]

FORMAT = CheckpointFormat(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    described="a checkpoint of DeepSpeed",
    matches=is_deepspeed,
    read="lmcore.conversion.deepspeed.read:read_deepspeed",
    write="lmcore.conversion.deepspeed.write:write_deepspeed",
    options=("layout",),
    styles=STYLES,
    optimizer=True,
    checkpoints=checkpoints_at,
    files="`mp_rank_XX_model_states.pt` or `layer_XX-model_XX-model_states.pt`, in it or in one "
    "directory inside, such as `global_stepN`",
)
