"""What can be wrong with the way in which a run's processes divide the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmcore.config.layout import ParallelLayout
from lmcore.config.load import LoadedConfig
from lmcore.config.model_math import ffn_width, query_groups
from lmcore.config.optimizers import optimizer_layout_problems
from lmcore.config.rules.graph import graph_problems
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["data_parallel_size", "parallel_problems"]

Problems = Iterator[LmcoreError]

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


def data_parallel_size(loaded: LoadedConfig, world_size: int) -> int | None:
    """Return the processes that see different samples; None where the sizes do not go together."""
    model = _model_size(loaded)
    return world_size // model if world_size % model == 0 else None


def parallel_problems(loaded: LoadedConfig, world_size: int) -> Problems:
    """Yield what does not fit *world_size* processes, the model's shape or the batch."""
    data = data_parallel_size(loaded, world_size)
    if data is None:
        yield _does_not_multiply(loaded, world_size)
    yield from _tensor(loaded)
    yield from _context(loaded)
    yield from _pipeline(loaded)
    if data is not None:
        yield from _sharding(loaded, data)
        layout = ParallelLayout.of(loaded.config, world_size)
        yield from _sharded_stages(loaded, layout)
        yield from _micro_batches(loaded, layout)
        yield from optimizer_layout_problems(loaded, layout)
        yield from graph_problems(loaded, layout)


def _model_size(loaded: LoadedConfig) -> int:
    product = 1
    for name in _SIZES:
        product *= loaded.value(name)
    return product


def _does_not_multiply(loaded: LoadedConfig, world_size: int) -> LmcoreError:
    model = _model_size(loaded)
    given = " times ".join(loaded.shown(name) for name in _SIZES if loaded.value(name) > 1)
    lower = world_size // model * model
    numbers = " or ".join(f"`--nproc-per-node {n}`" for n in (lower, lower + model) if n)
    return ConfigError(
        f"{world_size} processes are not a multiple of {model}: {given}",
        why="each copy of the model takes that many processes",
        hint=f"use {numbers} on one host, or smaller sizes",
    )


def _tensor(loaded: LoadedConfig) -> Problems:
    size = loaded.value("tensor_model_parallel_size")
    model = loaded.config.model
    widths = {"num_attention_heads": model.num_attention_heads, "ffn_hidden_size": ffn_width(model)}
    if model.group_query_attention:
        widths["num_query_groups"] = query_groups(model)
    for name, width in widths.items():
        yield from _divides(
            loaded,
            name,
            width,
            size,
            by="tensor_model_parallel_size",
            why="each process has the same number of attention heads and feed-forward channels"
            if name != "num_query_groups"
            else "each process has the same number of heads of keys and values",
            together_with=widths.values(),
        )


def _context(loaded: LoadedConfig) -> Problems:
    tensor, context = (
        loaded.value("tensor_model_parallel_size"),
        loaded.value("context_parallel_size"),
    )
    length = loaded.value("seq_length")
    if context > 1:
        before = length % (2 * context)
        yield from _divides(
            loaded,
            "seq_length",
            length,
            2 * context,
            by="context_parallel_size",
            why="each process has one chunk from the front of a sequence and one from the back, "
            f"so that it is cut into {2 * context}",
        )
        if before:
            return
    if loaded.value("sequence_parallel") and tensor > 1:
        yield from _divides(
            loaded,
            "seq_length",
            length,
            tensor * context,
            by="tensor_model_parallel_size",
            why=f"`--sequence-parallel` cuts {length // context} tokens into {tensor} equal parts",
        )


def _divides(
    loaded: LoadedConfig,
    name: str,
    value: int,
    parts: int,
    *,
    by: str,
    why: str,
    together_with: Iterable[int] = (),
) -> Problems:
    if value % parts == 0:
        return
    lower = value // parts * parts
    near = " or ".join(f"`{_flag(name)} {n}`" for n in (lower, lower + parts) if n)
    others = parts // loaded.value(by)
    sizes = [
        n
        for n in range(1, loaded.value(by) + 1)
        if all(one % (others * n) == 0 for one in (value, *together_with))
    ]
    smaller = f", or `{_flag(by)} {sizes[-1]}`" if sizes else ""
    shown = loaded.shown(name) if loaded.value(name) is not None else f"`{_flag(name)} {value}`"
    yield ConfigError(
        f"{shown} is not divisible by {parts}, which {loaded.shown(by)} asks for",
        why=why,
        hint=f"use {near}{smaller}",
    )


def _pipeline(loaded: LoadedConfig) -> Problems:
    size, layers = loaded.value("pipeline_model_parallel_size"), loaded.value("num_layers")
    if size == 1:
        yield from _no_pipeline(loaded)
    elif layers < size:
        yield ConfigError(
            f"{loaded.shown('num_layers')} is less than "
            f"{loaded.shown('pipeline_model_parallel_size')}",
            why="each stage has at least one layer",
            hint=f"use `--pipeline-model-parallel-size {layers}`, or more layers",
        )
    else:
        unequal = list(_unequal_stages(loaded, layers, size))
        yield from unequal or _schedule(loaded, layers, size)


def _no_pipeline(loaded: LoadedConfig) -> Problems:
    for name in ("num_layers_per_virtual_pipeline_stage", "pipeline_schedule"):
        if loaded.value(name) is not None:
            yield ConfigError(
                f"{loaded.shown(name)} needs a pipeline",
                why="the layers are all on one process",
                hint="add `--pipeline-model-parallel-size N`, or leave it out",
            )


def _unequal_stages(loaded: LoadedConfig, layers: int, size: int) -> Problems:
    per_stage = loaded.value("num_layers_per_virtual_pipeline_stage")
    if per_stage is None or layers % (size * per_stage) == 0:
        return
    fitting = [n for n in range(1, layers + 1) if layers % (size * n) == 0]
    hint = (
        "use " + " or ".join(f"`--num-layers-per-virtual-pipeline-stage {n}`" for n in fitting)
        if fitting
        else f"use `--num-layers {layers // size * size}` or `{(layers // size + 1) * size}`"
    )
    yield ConfigError(
        f"{loaded.shown('num_layers')} is not a multiple of "
        f"{loaded.shown('pipeline_model_parallel_size')} times "
        f"{loaded.shown('num_layers_per_virtual_pipeline_stage')}",
        why="all stages of an interleaved pipeline are alike",
        hint=hint,
    )


def _schedule(loaded: LoadedConfig, layers: int, size: int) -> Problems:
    per_stage = loaded.value("num_layers_per_virtual_pipeline_stage")
    schedule = loaded.value("pipeline_schedule")
    several = per_stage is not None and layers > size * per_stage
    if schedule == "interleaved" and not several:
        yield ConfigError(
            "`--pipeline-schedule interleaved` needs several stages in each process",
            why="it goes through a process's stages in turn",
            hint=f"add `--num-layers-per-virtual-pipeline-stage {n}`"
            if (n := _smaller_stage(layers, size))
            else f"use `--num-layers {2 * size}` or more, or `--pipeline-schedule 1f1b`",
        )
    if several and schedule in {"1f1b", "gpipe", "zero-bubble-v"}:
        yield ConfigError(
            f"`--pipeline-schedule {schedule}` does not go with "
            f"{loaded.shown('num_layers_per_virtual_pipeline_stage')}",
            why="it decides by itself how many stages a process has",
            hint="use `--pipeline-schedule interleaved` or zero-bubble, or leave one of them out",
        )
    if schedule == "zero-bubble-v" and layers < 2 * size:
        yield ConfigError(
            f"`--pipeline-schedule zero-bubble-v` needs {2 * size} layers",
            why="each process has two stages of it",
            hint=f"use `--num-layers {2 * size}` or more, or another schedule",
        )


def _smaller_stage(layers: int, size: int) -> int | None:
    """Return the most layers of a stage of which a process has several alike."""
    fitting = [n for n in range(1, layers) if layers % (size * n) == 0 and layers > size * n]
    return fitting[-1] if fitting else None


def _sharding(loaded: LoadedConfig, data: int) -> Problems:
    replicas, stage = loaded.value("data_parallel_replicas"), loaded.value("zero_stage") or 0
    shards = stage or loaded.value("use_distributed_optimizer")
    if loaded.value("use_distributed_optimizer") and loaded.value("zero_stage") == 0:
        yield ConfigError(
            "`--use-distributed-optimizer` and `--zero-stage 0` exclude each other",
            hint="keep one of them",
        )
    if replicas == 1:
        return
    if not shards:
        yield ConfigError(
            f"{loaded.shown('data_parallel_replicas')} needs `--zero-stage 1`, 2 or 3",
            why="without it all data-parallel processes are replicas anyway",
            hint="add `--zero-stage`, or leave it out",
        )
    elif data % replicas or data == replicas:
        fitting = [n for n in range(1, data) if data % n == 0]
        yield ConfigError(
            f"{loaded.shown('data_parallel_replicas')} does not leave several equal shards of "
            f"{data} data-parallel processes",
            why="each replica is shared out over the same number of processes, two or more",
            hint="use " + " or ".join(f"`--data-parallel-replicas {n}`" for n in fitting)
            if fitting
            else "use more processes",
        )


def _sharded_stages(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    schedule, stage = layout.schedule, layout.zero_stage
    tied = not loaded.value("untie_embeddings_and_output_weights")
    why = None
    delayed = schedule == "zero-bubble" or (schedule == "zero-bubble-v" and not tied)
    if delayed and stage == 3:
        why = "gradients of weights are computed later, when stage 3 has let the weights go"
    elif schedule == "zero-bubble-v" and stage and tied:
        why = "a process has the first and the last stage, which share the embedding's weights"
    if layout.pipeline > 1 and why is not None:
        yield ConfigError(
            f"`--pipeline-schedule {schedule}` does not go with ZeRO stage {stage}",
            why=why,
            hint="use `--pipeline-schedule 1f1b`" + (", or `--zero-stage 1`" if delayed else ""),
        )


def _micro_batches(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    if layout.pipeline == 1:
        return
    micro = loaded.value("micro_batch_size")
    total = loaded.value("global_batch_size") or micro * layout.data
    ramp = loaded.value("rampup_batch_size")
    each = micro * layout.data
    count = (ramp[0] if ramp else total) // each
    if count < layout.pipeline:
        yield ConfigError(
            f"{'1 micro-batch is' if count == 1 else f'{count} micro-batches are'} fewer than the "
            f"pipeline's {layout.pipeline} processes",
            why="a step would never have work for all of them at once",
            hint=f"use `--global-batch-size {each * layout.pipeline}` or more, or a smaller "
            "micro-batch",
        )
    elif layout.schedule in {"interleaved", "zero-bubble"}:
        # Of a ramp all sizes are multiples where the first two are.
        counts = [count, (ramp[0] + ramp[1]) // each] if len(ramp) == 3 else [count]
        odd = [one for one in counts if one % layout.pipeline]
        if odd:
            yield _not_in_groups(loaded, layout, odd[0], each)


def _not_in_groups(
    loaded: LoadedConfig, layout: ParallelLayout, count: int, each: int
) -> LmcoreError:
    group = layout.pipeline * each
    lower = count // layout.pipeline * layout.pipeline
    hint = " or ".join(
        f"`--global-batch-size {n * each}`" for n in (lower, lower + layout.pipeline)
    )
    if loaded.value("rampup_batch_size"):
        hint = f"in `--rampup-batch-size` a START and an INCREMENT that are multiples of {group}"
    article = "an interleaved" if layout.schedule == "interleaved" else "a zero-bubble"
    return ConfigError(
        f"{count} micro-batches are not a multiple of the pipeline's {layout.pipeline} processes",
        why=f"{article} schedule takes micro-batches in groups of that size",
        hint=f"use {hint}",
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
