"""Checkpoints of DeepSpeed's engine: of Megatron-DeepSpeed, and of models of transformers."""

from lmcore.model.checkpoint_format import CheckpointFormat
from lmcore_deepspeed.checkpoint.directory import (
    STYLES,
    checkpoints_at,
    is_deepspeed,
    tokenizer_places,
)

__all__ = ["FORMAT"]

FORMAT = CheckpointFormat(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    described="a checkpoint of DeepSpeed",
    matches=is_deepspeed,
    read="lmcore_deepspeed.checkpoint.read:read_deepspeed",
    write="lmcore_deepspeed.checkpoint.write:write_deepspeed",
    options=("layout",),
    styles=STYLES,
    optimizer=True,
    checkpoints=checkpoints_at,
    files="`mp_rank_XX_model_states.pt` or `layer_XX-model_XX-model_states.pt`, in it or in one "
    "directory inside, such as `global_stepN`",
    tokenizer_places=tokenizer_places,
)
