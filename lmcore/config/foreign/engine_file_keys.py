"""Keys of DeepSpeed's file, in tables by their treatment here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["IDLE", "KNOWN", "NATIVE_IDLE", "NATIVE_REFUSED", "REFUSED"]

IDLE: Mapping[str, str] = {
    "activation_checkpointing": "`--recompute` says what is recomputed",
    "checkpoint": "lmcore writes the checkpoints",
    "dataloader_drop_last": "lmcore loads the data",
}
"""Reason why a section has no effect here, by key."""

REFUSED: Mapping[str, str] = {
    "amp": "the precision is set by `--precision`",
    "autotuning": "it starts runs of its own",
    "compression_training": "it changes the model in training",
    "curriculum_learning": "lmcore determines the order of samples",
    "data_efficiency": "lmcore determines the order of samples",
    "elasticity": "batch sizes are set by `--micro-batch-size` and `--global-batch-size`",
    "expert_parallel": "the model has no experts",
    "hybrid_engine": "it is for reinforcement learning",
    "managed_gradient_accumulation": "lmcore determines the end of a step",
    "pipeline": "lmcore does not run pipelines with DeepSpeed",
    "progressive_layer_drop": "it changes the model in training",
    "quantize_training": "it changes the model in training",
    "scheduler": "the learning rate follows `--lr-decay-style` and the options beside it",
    "sequence_parallel_size": "lmcore does not use DeepSpeed's sequence parallelism",
    "sparse_attention": "lmcore computes attention with its own op",
    "tensor_parallel": "lmcore does not use DeepSpeed's tensor parallelism",
    "torch_autocast": "the precision is set by `--precision`",
    "weight_quantization": "it is for inference",
}
"""Reason why a section is refused, by key."""

KNOWN: frozenset[str] = frozenset(
    {
        "aio",
        "bf16",
        "bfloat16",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_types",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "log_level",
        "memory_breakdown",
        "optimizer",
        "prescale_gradients",
        "seq_parallel_communication_data_type",
        "steps_per_print",
        "tensorboard",
        "timers",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Keys that are settings of the run or are passed on to DeepSpeed."""

_SHARDING = "torch's sharding has its own buckets, prefetching and overlap"
_REDUCTION = "gradients are summed in fp32, and averaged over the samples"
_TIMES = "`--log-interval` sets when progress is logged; `--profile` times the parts of a step"
_RECORDS = "the run directory has metrics.jsonl, and TensorBoard's events"
_OWN = "it is for DeepSpeed's own engine"

NATIVE_IDLE: Mapping[str, str] = {
    "zero_optimization": _SHARDING,
    **dict.fromkeys(
        (
            *("communication_data_type", "data_types", "gradient_allreduce_op"),
            *("gradient_predivide_factor", "prescale_gradients"),
        ),
        _REDUCTION,
    ),
    **dict.fromkeys(
        (
            *("comms_logger", "flops_profiler", "memory_breakdown", "steps_per_print", "timers"),
            "wall_clock_breakdown",
        ),
        _TIMES,
    ),
    **dict.fromkeys(("comet", "csv_monitor", "tensorboard", "wandb"), _RECORDS),
    **dict.fromkeys(
        (
            *("aio", "compile", "datastates_ckpt", "disable_allgather", "disable_python_gc"),
            *("dump_state", "log_level", "seq_parallel_communication_data_type"),
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        ),
        _OWN,
    ),
}
"""Reason why a key has no effect with the native engine; of `zero_optimization` all keys that are
neither settings here nor in `NATIVE_REFUSED`."""

_REPLICAS = "use `--data-parallel-replicas N` instead, and delete it from the file"

NATIVE_REFUSED: Mapping[str, tuple[str, str]] = {
    "mics_shard_size": ("the native engine counts the replicas, not their processes", _REPLICAS),
    "zero_hpz_partition_size": ("the native engine shards weights in one way only", _REPLICAS),
    "zero_quantized_gradients": (
        "the native engine does not quantize what it communicates",
        "delete it from the file",
    ),
    "zero_quantized_weights": (
        "the native engine does not quantize what it communicates",
        "delete it from the file",
    ),
    "offload_param": (
        "the native engine keeps the weights on the device",
        'set its `device` to "none"',
    ),
}
"""Reason why a key of `zero_optimization` is refused with the native engine, and the hint."""
