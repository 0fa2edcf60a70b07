"""Section `parallel`: the layout of the processes, and their communication."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import FREE, option

__all__ = ["SCHEDULES", "ParallelSection"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v")
"""Orders in which the stages of a pipeline process micro-batches."""


@dataclass(frozen=True)
class ParallelSection:
    """Layout of the processes, each with its device, and their communication."""

    engine: str = option(
        "native",
        "Training engine: native (torch), or DeepSpeed (`lmcore[deepspeed]`).",
        choices=("native", "deepspeed"),
    )
    tensor_model_parallel_size: int = option(
        1,
        "Tensor-parallel size: processes that shard each layer's weights.",
        minimum=1,
        on_resume=FREE,
    )
    sequence_parallel: bool = option(
        False,
        "Shard activations between the layers along the sequence, over the tensor-parallel "
        "processes.",
        on_resume=FREE,
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline-parallel size: processes that divide the layers.", minimum=1, on_resume=FREE
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Layers in each stage of an interleaved pipeline, in which a process has several stages.",
        minimum=1,
        on_resume=FREE,
    )
    pipeline_schedule: str | None = option(
        None,
        "Pipeline schedule; default: interleaved if a process has several stages, else 1f1b.",
        choices=SCHEDULES,
        on_resume=FREE,
    )
    context_parallel_size: int = option(
        1, "Context-parallel size: processes that divide each sequence.", minimum=1, on_resume=FREE
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard the optimizer state over data-parallel processes (zero_stage 1).",
        on_resume=FREE,
    )
    data_parallel_replicas: int = option(
        1,
        "Number of replicas among the data-parallel processes; zero_stage shards within each "
        "replica.",
        minimum=1,
        on_resume=FREE,
    )
    zero_stage: int | None = option(
        None,
        "ZeRO stage: shard optimizer state (1), gradients too (2), weights too (3) over "
        "data-parallel processes; 0: nothing; default: 0, with --engine deepspeed 1.",
        minimum=0,
        maximum=3,
        on_resume=FREE,
    )
    cpu_offload: bool = option(
        False,
        "Keep the optimizer state, in stage 3 also the weights, in host memory.",
        on_resume=FREE,
    )
    deepspeed_config: str | None = option(
        None,
        'DeepSpeed\'s JSON configuration; missing and "auto" values are filled in from the '
        "settings here.",
        metavar="FILE",
        on_resume=FREE,
    )

    nproc_per_node: int | None = option(
        None,
        "Processes to start on this host; default: one for each device. Under a launcher only its "
        "own number is allowed.",
        minimum=1,
        maximum=4096,
        on_resume=FREE,
    )
    distributed_backend: str | None = option(
        None,
        "Communication backend of the device, by name; default: the available backend of highest "
        "priority.",
        on_resume=FREE,
    )
    distributed_timeout_minutes: float = option(
        10.0, "Timeout of collectives and rendezvous, in minutes.", above=0, on_resume=FREE
    )
