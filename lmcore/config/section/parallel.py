"""How many processes train together, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option

__all__ = ["SCHEDULES", "ParallelSection"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v")
"""Orders in which the stages of a pipeline process micro-batches."""


@dataclass(frozen=True)
class ParallelSection:
    """Processes of a run, each with a device, and the engine that keeps them together."""

    engine: str = option(
        "native",
        "What takes the steps: torch's own blocks, or DeepSpeed (`lmcore[deepspeed]`).",
        choices=("native", "deepspeed"),
    )
    tensor_model_parallel_size: int = option(
        1, "Processes that divide every layer's weights, heads and vocabulary.", minimum=1
    )
    sequence_parallel: bool = option(
        False,
        "Divide activations between the layers along the sequence, over the processes of "
        "tensor_model_parallel_size.",
    )
    pipeline_model_parallel_size: int = option(1, "Processes that divide the layers.", minimum=1)
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Layers of one of several stages of each process of a pipeline (interleaved).",
        minimum=1,
    )
    pipeline_schedule: str | None = option(
        None,
        "Order of a pipeline's micro-batches; default: interleaved where a process has several "
        "stages, else 1f1b.",
        choices=SCHEDULES,
    )
    context_parallel_size: int = option(1, "Processes that divide every sequence.", minimum=1)
    use_distributed_optimizer: bool = option(
        False, "Shard the optimizer's state over data-parallel processes: zero_stage 1."
    )
    data_parallel_replicas: int = option(
        1,
        "Groups of data-parallel processes that hold the same shards; zero_stage shards within a "
        "group.",
        minimum=1,
    )
    zero_stage: int | None = option(
        None,
        "What is sharded over data-parallel processes: 1 optimizer state, 2 gradients too, 3 "
        "weights too; 0 nothing.",
        minimum=0,
        maximum=3,
    )
    cpu_offload: bool = option(
        False, "Keep the optimizer's state, and of stage 3 the weights, in the host's memory."
    )
    deepspeed_config: str | None = option(
        None,
        'DeepSpeed\'s own JSON file; what it leaves out, or calls "auto", is filled in from the '
        "settings here.",
        metavar="FILE",
    )

    nproc_per_node: int | None = option(
        None,
        "Processes to start on this host; default: one for each device. Under a launcher, which "
        "starts them itself, it may only repeat the launcher's number.",
        minimum=1,
        maximum=4096,
    )
    distributed_backend: str | None = option(
        None,
        "How processes exchange tensors: a communication backend of the device by its name. "
        "Default: the best that is there.",
    )
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that a process waits for the others before the run fails.", above=0
    )
