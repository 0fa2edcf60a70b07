"""Top-level keys of DeepSpeed's file, in three tables by their treatment here."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["IDLE", "KNOWN", "REFUSED"]

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
