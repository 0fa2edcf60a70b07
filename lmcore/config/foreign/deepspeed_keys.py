"""The keys of DeepSpeed's file, and what becomes of each: three tables and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["IDLE", "KNOWN", "REFUSED"]

IDLE: Mapping[str, str] = {
    "activation_checkpointing": "`--recompute` says what is recomputed",
    "checkpoint": "checkpoints are lmcore's own",
    "dataloader_drop_last": "batches are lmcore's own",
}
"""Sections that change nothing here, and why."""

REFUSED: Mapping[str, str] = {
    "amp": "the precision is set by `--precision`",
    "autotuning": "it starts runs of its own",
    "compression_training": "it changes the model in training",
    "curriculum_learning": "the order of samples is lmcore's own",
    "data_efficiency": "the order of samples is lmcore's own",
    "elasticity": "batch sizes are set by `--micro-batch-size` and `--global-batch-size`",
    "expert_parallel": "the model has no experts",
    "hybrid_engine": "it is for reinforcement learning",
    "managed_gradient_accumulation": "lmcore says where a step ends",
    "pipeline": "pipelines are not run by DeepSpeed here",
    "progressive_layer_drop": "it changes the model in training",
    "quantize_training": "it changes the model in training",
    "scheduler": "the learning rate follows `--lr-decay-style` and the options beside it",
    "sequence_parallel_size": "sequences are not split by DeepSpeed here",
    "sparse_attention": "attention is an op of lmcore's",
    "tensor_parallel": "layers are not split by DeepSpeed here",
    "torch_autocast": "the precision is set by `--precision`",
    "weight_quantization": "it is for inference",
}
"""Sections that would work against settings here, and why."""

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
"""Those that are settings of the run, or go to DeepSpeed as they are."""
