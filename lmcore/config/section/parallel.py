"""Section `parallel`: the layout of the processes, and their communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.config.need import Need
from lmcore.config.option import FREE, INPUT_PATH, option

if TYPE_CHECKING:
    from lmcore.model.training_engine import TrainingEngine

__all__ = ["ENGINE_FILE", "SCHEDULES", "ParallelSection"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v")
"""Orders in which the stages of a pipeline process micro-batches."""

_TENSOR = Need(
    "`--tensor-model-parallel-size` above 1",
    lambda run: run.config.parallel.tensor_model_parallel_size > 1,
)
_PIPELINE = Need(
    "`--pipeline-model-parallel-size` above 1",
    lambda run: run.config.parallel.pipeline_model_parallel_size > 1,
    refused="all layers are on one process",
)
_SHARDS = Need(
    "several data-parallel processes",
    lambda run: (
        run.layout is None
        or run.layout.data * run.layout.context > 1
        or not run.config.parallel.by_layout
    ),
)
_PROCESSES = Need("several processes", lambda run: run.layout is None or run.layout.world_size > 1)
_ZERO = Need(
    "`--zero-stage` 1, 2 or 3",
    lambda run: bool(
        run.config.parallel.zero_stage or run.config.parallel.use_distributed_optimizer
    ),
    refused="without it all data-parallel processes are replicas anyway",
)
_SPLIT = Need(
    "`--model-family t5 --pipeline-model-parallel-size`",
    lambda run: run.family in {"T5", ""} and run.config.parallel.pipeline_model_parallel_size > 1,
)
ENGINE_FILE = "deepspeed_config"
"""Option that names a file of an engine's settings."""
_OFFLOADS = Need("`--engine deepspeed`", lambda run: run.config.parallel.offloads)


@dataclass(frozen=True)
class ParallelSection:
    """Layout of the processes, each with its device, and their communication."""

    engine: str = option(
        "native",
        "Training engine: native (torch), deepspeed (of `lmcore[deepspeed]`), or the name of a "
        "plugin's.",
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
        needs=_TENSOR,
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline-parallel size: processes that divide the layers.", minimum=1, on_resume=FREE
    )
    pipeline_model_parallel_split_rank: int | None = option(
        None,
        "First process of the pipeline with layers of the decoder of an encoder-decoder model; "
        "default: half of the pipeline's size.",
        minimum=0,
        on_resume=FREE,
        needs=_SPLIT,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        "Layers in each stage of an interleaved pipeline, in which a process has several stages.",
        minimum=1,
        on_resume=FREE,
        needs=_PIPELINE,
    )
    pipeline_schedule: str | None = option(
        None,
        "Pipeline schedule; default: interleaved if a process has several stages, else 1f1b.",
        choices=SCHEDULES,
        on_resume=FREE,
        needs=_PIPELINE,
    )
    context_parallel_size: int = option(
        1, "Context-parallel size: processes that divide each sequence.", minimum=1, on_resume=FREE
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard the optimizer state over data-parallel processes (zero_stage 1).",
        on_resume=FREE,
        needs=_SHARDS,
    )
    data_parallel_replicas: int = option(
        1,
        "Number of replicas among the data-parallel processes; zero_stage shards within each "
        "replica.",
        minimum=1,
        on_resume=FREE,
        needs=_ZERO,
    )
    zero_stage: int | None = option(
        None,
        "ZeRO stage: shard optimizer state (1), gradients too (2), weights too (3) over "
        "data-parallel processes; 0: nothing; default: 0, with --engine deepspeed 1.",
        minimum=0,
        maximum=3,
        on_resume=FREE,
        needs=_SHARDS.or_off(0),
    )
    cpu_offload: bool = option(
        False,
        "Keep the optimizer state, in stage 3 also the weights, in host memory.",
        on_resume=FREE,
        needs=_OFFLOADS,
    )
    deepspeed_config: str | None = option(
        None,
        'DeepSpeed\'s JSON configuration, for either engine; missing and "auto" values are filled '
        "in from the settings here.",
        metavar="FILE",
        on_resume=FREE,
        paths=INPUT_PATH,
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
        needs=_PROCESSES,
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "Timeout of collectives and rendezvous, in minutes.",
        above=0,
        on_resume=FREE,
        needs=_PROCESSES,
    )

    @property
    def engine_file(self) -> str | None:
        """Path of the file of an engine's settings; None without one."""
        return self.deepspeed_config

    @property
    def by_layout(self) -> bool:
        """True if the run's layout divides the model; False: the engine shards it by itself."""
        return _engine(self.engine).by_layout

    @property
    def offloads(self) -> bool:
        """True if the engine can keep the optimizer's state in the host's memory, or is unknown."""
        engine = _engine(self.engine)
        return engine.offloads or not engine.open


def _engine(name: str) -> TrainingEngine:
    from lmcore.model.training_engine import engine_named  # a library's process needs no engine

    return engine_named(name)
