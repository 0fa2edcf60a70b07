"""Parallel layout of a run: the size of each axis along which processes divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["ParallelLayout", "pipeline_split"]


def pipeline_split(config: Config) -> int:
    """Return the first process of the pipeline with layers of a model's second stack, or 0.

    Args:
        config: Settings, which may be wrong.
    """
    sizes, model = config.parallel, config.model
    size = sizes.pipeline_model_parallel_size
    if size == 1:
        return 0
    from lmcore.model.family import named_family  # other runs need no families

    family = named_family(model.model_family or "")
    if family is None or family.stacks is None or not family.pipelines:
        return 0
    split = sizes.pipeline_model_parallel_split_rank
    return size // 2 if split is None else split


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes of a run.

    Ranks are numbered with `tensor` as the fastest axis; the order from slowest to fastest is
    pipeline, replicas, shards, context, tensor.

    Attributes:
        tensor: Number of processes that shard each layer's weights.
        context: Number of processes that divide each sequence.
        pipeline: Number of processes that divide the layers.
        data: Number of processes that see different samples.
        sequence: True if tensor-parallel processes shard activations between the layers too.
        replicas: Number of replicas among the data-parallel processes, each sharded.
        zero_stage: ZeRO stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 weights
            too.
        stages_per_process: Number of pipeline stages on each process.
        schedule: One of `lmcore.config.section.parallel.SCHEDULES`.
        pipeline_split: First process of the pipeline with layers of a model's second stack; 0: its
            layers are one stack.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    replicas: int = 1
    zero_stage: int = 0
    stages_per_process: int = 1
    schedule: str = "1f1b"
    pipeline_split: int = 0

    @classmethod
    def of(cls, config: Config, world_size: int) -> ParallelLayout:
        """Return the layout of *world_size* processes.

        Args:
            config: Settings whose sizes fit the number of processes.
            world_size: Number of processes of the run.
        """
        sizes = config.parallel
        tensor, context = sizes.tensor_model_parallel_size, sizes.context_parallel_size
        pipeline = sizes.pipeline_model_parallel_size
        data = world_size // (tensor * context * pipeline)
        zero_stage = sizes.zero_stage or 0
        if sizes.use_distributed_optimizer:
            zero_stage = max(zero_stage, 1)
        if not sizes.by_layout:
            zero_stage = 0  # the engine does the sharding
        schedule = sizes.pipeline_schedule
        per_stage = sizes.num_layers_per_virtual_pipeline_stage
        stages = 1
        if per_stage is not None:
            stages = config.model.num_layers // (pipeline * per_stage)
        if schedule is None:
            schedule = "interleaved" if stages > 1 else "1f1b"
        if schedule == "zero-bubble-v":
            stages = 2
        return cls(
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            data=data,
            sequence=sizes.sequence_parallel and tensor > 1,
            replicas=sizes.data_parallel_replicas,
            zero_stage=zero_stage if data * context > 1 else 0,
            stages_per_process=stages if pipeline > 1 else 1,
            schedule=schedule,
            pipeline_split=pipeline_split(config),
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sequence_parts(self) -> int:
        """Number of equal parts that the length of a sequence must be divisible by."""
        context = 2 * self.context if self.context > 1 else 1
        return context * (self.tensor if self.sequence else 1)

    @property
    def divides_model(self) -> bool:
        """True if no process holds the whole model and optimizer state."""
        return self.tensor > 1 or self.pipeline > 1 or self.zero_stage > 0

    @property
    def words(self) -> str:
        """The layout in words: "tensor 2 (sequence) x pipeline 2 x data 2 (ZeRO-1)"."""
        parts = []
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}" + (" (sequence)" if self.sequence else ""))
        if self.context > 1:
            parts.append(f"context {self.context}")
        if self.pipeline > 1:
            stages = f", {self.stages_per_process} stages each" * (self.stages_per_process > 1)
            split = f", split at {self.pipeline_split}" * bool(self.pipeline_split)
            parts.append(f"pipeline {self.pipeline} ({self.schedule}{stages}{split})")
        notes = [f"ZeRO-{self.zero_stage}"] if self.zero_stage else []
        if self.zero_stage and self.replicas > 1:
            notes.append(f"{self.replicas} replicas")
        if self.data > 1 or notes or not parts:
            parts.append(f"data {self.data}" + (f" ({', '.join(notes)})" if notes else ""))
        return " x ".join(parts)
