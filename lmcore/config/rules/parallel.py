"""Rules for the engine and the layout: how the processes divide the model, batch and sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lmcore.base.errors import ConfigError, LmcoreError, counted, suggestion
from lmcore.config.derived.layout import ParallelLayout, pipeline_split
from lmcore.config.derived.model_math import ffn_hidden_size, model_shape, num_query_groups
from lmcore.config.engine import beyond, offloading
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.rules.optimizer import optimizer_layout_problems
from lmcore.config.rules.training import schedule_of_multiples, scheduled_sizes
from lmcore.config.settings import LoadedConfig
from lmcore.model.family import Family, named_family
from lmcore.model.training_engine import absent_plugins, engine_named, engines

__all__ = [
    "ENGINE_RULES",
    "PARALLEL_RULES",
    "data_parallel_size",
    "layout_problems",
    "world_size_problem",
]

_COLLECTIVES = "forward and backward contain collectives, which the graph does not capture"


def data_parallel_size(loaded: LoadedConfig, world_size: int) -> int | None:
    """Return the number of data-parallel processes; None if the sizes do not divide it."""
    size = _processes_of_replica(loaded)
    return world_size // size if world_size % size == 0 else None


def world_size_problem(
    loaded: LoadedConfig, world_size: int, processes_hint: Callable[[int], str] | None = None
) -> LmcoreError:
    """Return the problem of a number of processes that is no multiple of a replica's.

    Args:
        loaded: The settings.
        world_size: Number of processes.
        processes_hint: Returns how to start a multiple of its argument; None: by
            `--nproc-per-node`.
    """
    size = _processes_of_replica(loaded)
    given = " times ".join(loaded.shown(name) for name, n in _sizes(loaded).items() if n > 1)
    if processes_hint is None:
        lower = world_size // size * size
        numbers = " or ".join(f"`--nproc-per-node {n}`" for n in (lower, lower + size) if n)
        advice = f"use {numbers} on one host, or"
    else:
        advice = f"{processes_hint(size)}, or use"
    return ConfigError(
        f"{given} needs a multiple of {size} processes; this run has {world_size}",
        why="each replica of the model takes that many processes",
        hint=f"{advice} smaller sizes",
    )


def _sizes(loaded: LoadedConfig) -> dict[str, int]:
    parallel = loaded.config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
    }


def _processes_of_replica(loaded: LoadedConfig) -> int:
    tensor, pipeline, context = _sizes(loaded).values()
    return tensor * pipeline * context


_SEARCHED = 1 << 12
"""Largest size that is tried for a hint, so that an absurd size is refused at once."""


_PARTS = {
    **dict.fromkeys(
        ("num_attention_heads", "ffn_hidden_size"), "attention heads and feed-forward channels"
    ),
    "num_query_groups": "key and value heads",
    "pad_vocab_size_to": "rows of the vocabulary",
}
"""Parts of the model that tensor parallelism divides, by the option that sets their number."""


def _tensor(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    widths = {
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size(model),
    }
    if model.group_query_attention:
        widths["num_query_groups"] = num_query_groups(model)
    if model.pad_vocab_size_to is not None:
        widths["pad_vocab_size_to"] = model.pad_vocab_size_to
    for name, width in widths.items():
        yield from _divisible(
            loaded,
            name,
            width,
            loaded.config.parallel.tensor_model_parallel_size,
            by="tensor_model_parallel_size",
            why=f"each process has the same number of {_PARTS[name]}",
            together_with=widths.values(),
        )


def _context(loaded: LoadedConfig) -> Problems:
    parallel, length = loaded.config.parallel, loaded.config.model.seq_length
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if context > 1:
        yield from _divisible(
            loaded,
            "seq_length",
            length,
            2 * context,
            by="context_parallel_size",
            why="each process has one chunk from the front of a sequence and one from the back, "
            f"so that it is cut into {2 * context}",
        )
        if length % (2 * context):
            return
    if parallel.sequence_parallel and tensor > 1:
        yield from _divisible(
            loaded,
            "seq_length",
            length,
            tensor * context,
            by="tensor_model_parallel_size",
            why=f"`--sequence-parallel` cuts {length // context} tokens into {tensor} equal parts",
        )


def _divisible(
    loaded: LoadedConfig,
    name: str,
    value: int,
    parts: int,
    *,
    by: str,
    why: str,
    together_with: Iterable[int] = (),
) -> Problems:
    """Yield a problem if *parts* does not divide the value of an option.

    Args:
        loaded: The settings.
        name: Option that is divided.
        value: Its value, or the default derived for it.
        parts: Number of equal parts.
        by: Option that sets the number of parts.
        why: Why the parts must be equal.
        together_with: Further values that the hint's size must divide.
    """
    if value % parts == 0:
        return
    lower = value // parts * parts
    near = " or ".join(f"`{flag_of(name)} {n}`" for n in (lower, lower + parts) if n)
    asked = _sizes(loaded)[by]
    others = parts // asked
    smaller = [
        size
        for size in range(1, min(asked, _SEARCHED) + 1)
        if all(number % (others * size) == 0 for number in (value, *together_with))
    ]
    or_smaller = f", or `{flag_of(by)} {smaller[-1]}`" if smaller else ""
    given = loaded.value(name) is not None
    shown = loaded.shown(name) if given else f"`{name}: {value}` (derived)"
    yield ConfigError(
        f"{shown} is not divisible by {parts}, which {loaded.shown(by)} asks for",
        why=why,
        hint=f"use {near}{or_smaller}",
    )


def _pipeline(loaded: LoadedConfig) -> Problems:
    parallel, layers = loaded.config.parallel, loaded.config.model.num_layers
    size = parallel.pipeline_model_parallel_size
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if size == 1:
        return
    family = named_family(loaded.config.model.model_family or "")
    if family is not None and family.stacks is not None:
        if family.pipelines:
            yield from _two_stacks(loaded, family)
        return
    if layers < size:
        yield ConfigError(
            f"{loaded.shown('num_layers')} is less than "
            f"{loaded.shown('pipeline_model_parallel_size')}",
            why="each stage has at least one layer",
            hint=f"use `--pipeline-model-parallel-size {layers}`, or more layers",
        )
    elif per_stage is not None and layers % (size * per_stage):
        yield _unequal_stages(loaded, layers, size)
    else:
        yield from _schedule(loaded, layers, size)


def _two_stacks(loaded: LoadedConfig, family: Family) -> Problems:
    """Yield what is wrong with the pipeline of an encoder and a decoder."""
    parallel, size = loaded.config.parallel, loaded.config.parallel.pipeline_model_parallel_size
    for name, wrong in (
        ("pipeline_schedule", parallel.pipeline_schedule not in {None, "1f1b", "gpipe"}),
        (
            "num_layers_per_virtual_pipeline_stage",
            parallel.num_layers_per_virtual_pipeline_stage is not None,
        ),
    ):
        if wrong:
            yield ConfigError(
                f"{loaded.shown(name)} is not supported by {family.name} models",
                why="each process of their pipeline has one stage, of the encoder or the decoder",
                hint="use `--pipeline-schedule 1f1b` or `--pipeline-schedule gpipe`"
                if name == "pipeline_schedule"
                else "leave it out",
            )
    split = pipeline_split(loaded.config)
    if not 0 < split < size:
        yield ConfigError(
            f"{loaded.shown('pipeline_model_parallel_split_rank')} leaves the "
            f"{'encoder' if split <= 0 else 'decoder'} without a process",
            why=f"the pipeline has {size} processes, and the decoder begins at that one",
            hint=f"use `--pipeline-model-parallel-split-rank {size // 2}`, or leave it out",
        )
        return
    assert family.stacks is not None
    shape = model_shape(loaded.config.model, 1, loaded.config)
    for stack, stages in zip(family.stacks(shape), (split, size - split), strict=True):
        if stack.num_layers < stages:
            yield ConfigError(
                f"the {stack.name} has {counted(stack.num_layers, 'layer')}, fewer than its "
                f"{stages} stages of the pipeline",
                why="each stage has at least one layer",
                hint="use a smaller `--pipeline-model-parallel-size`, another "
                "`--pipeline-model-parallel-split-rank`, or more layers",
            )


def _unequal_stages(loaded: LoadedConfig, layers: int, size: int) -> LmcoreError:
    fitting = [n for n in range(1, min(layers, _SEARCHED) + 1) if layers % (size * n) == 0]
    stages = size * (loaded.config.parallel.num_layers_per_virtual_pipeline_stage or 1)
    near = [layers // stages * stages, (layers // stages + 1) * stages]
    flag, sizes = "--num-layers", [size for size in near if size]
    if fitting:
        flag, sizes = "--num-layers-per-virtual-pipeline-stage", fitting
    choices = [f"`{flag} {sizes[0]}`", *(f"`{one}`" for one in sizes[1:])]
    return ConfigError(
        f"{loaded.shown('num_layers')} is not a multiple of "
        f"{loaded.shown('pipeline_model_parallel_size')} times "
        f"{loaded.shown('num_layers_per_virtual_pipeline_stage')}",
        why="all stages of an interleaved pipeline have the same number of layers",
        hint=f"use {' or '.join(choices)}",
    )


def _schedule(loaded: LoadedConfig, layers: int, size: int) -> Problems:
    parallel = loaded.config.parallel
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    schedule = parallel.pipeline_schedule
    several = per_stage is not None and layers > size * per_stage
    if schedule == "interleaved" and not several:
        fitting = [
            n
            for n in range(1, min(layers, _SEARCHED))
            if layers % (size * n) == 0 and layers > size * n
        ]
        yield ConfigError(
            "`--pipeline-schedule interleaved` needs several stages in each process",
            why="it processes the stages of a process in turn",
            hint=f"add `--num-layers-per-virtual-pipeline-stage {fitting[-1]}`"
            if fitting
            else f"use `--num-layers {2 * size} --num-layers-per-virtual-pipeline-stage 1`, or "
            "`--pipeline-schedule 1f1b`",
        )
    if several and schedule in {"1f1b", "gpipe", "zero-bubble-v"}:
        yield ConfigError(
            f"`--pipeline-schedule {schedule}` cannot be combined with "
            f"{loaded.shown('num_layers_per_virtual_pipeline_stage')}",
            why="the schedule itself sets the number of stages of a process",
            hint="use `--pipeline-schedule interleaved` or `zero-bubble`, or leave one of them out",
        )
    if schedule == "zero-bubble-v" and layers < 2 * size:
        yield ConfigError(
            f"`--pipeline-schedule zero-bubble-v` needs {2 * size} layers",
            why="each process has two stages of it",
            hint=f"use `--num-layers {2 * size}` or more, or another schedule",
        )


PARALLEL_RULES: tuple[Rule, ...] = (_tensor, _context, _pipeline)


def layout_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Yield what cannot be combined with the layout of a known number of processes."""
    yield from _replicas(loaded, layout.data)
    yield from _sharded_stages(loaded, layout)
    yield from _micro_batches(loaded, layout)
    yield from optimizer_layout_problems(loaded, layout)
    yield from _graph_problems(loaded, layout)


def _replicas(loaded: LoadedConfig, data: int) -> Problems:
    parallel = loaded.config.parallel
    replicas = parallel.data_parallel_replicas
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        yield ConfigError(
            "`--use-distributed-optimizer` and `--zero-stage 0` exclude each other",
            hint="keep one of them",
        )
    sharded = parallel.zero_stage or parallel.use_distributed_optimizer
    if sharded and replicas > 1 and (data % replicas or data == replicas):
        fitting = [n for n in range(1, min(data, _SEARCHED)) if data % n == 0]
        yield ConfigError(
            f"{loaded.shown('data_parallel_replicas')} does not leave several equal shards of "
            f"{data} data-parallel processes",
            why="each replica is sharded over the same number of processes, two or more",
            hint="use " + " or ".join(f"`--data-parallel-replicas {n}`" for n in fitting)
            if fitting
            else "use more processes",
        )


def _sharded_stages(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    schedule, stage = layout.schedule, layout.zero_stage
    tied = not loaded.config.model.untie_embeddings_and_output_weights
    why = None
    delayed = schedule == "zero-bubble" or (schedule == "zero-bubble-v" and not tied)
    if delayed and stage == 3:
        why = "it computes weight gradients after stage 3 has released the weights"
    elif schedule == "zero-bubble-v" and stage and tied:
        why = "a process has the first and the last stage, which share the embedding's weights"
    if layout.pipeline > 1 and why is not None:
        yield ConfigError(
            f"`--pipeline-schedule {schedule}` cannot be combined with ZeRO stage {stage}",
            why=why,
            hint="use `--pipeline-schedule 1f1b`" + (", or `--zero-stage 1`" if delayed else ""),
        )


def _micro_batches(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Require enough micro-batches for the pipeline, in whole groups if the schedule asks."""
    if layout.pipeline == 1:
        return
    training = loaded.config.training
    ramp, each = training.rampup_batch_size, training.micro_batch_size * layout.data
    scheduled = scheduled_sizes(loaded)
    first = min(scheduled) if scheduled else next(iter(ramp), training.global_batch_size or each)
    count = first // each
    if count < layout.pipeline:
        enough = f"`--global-batch-size {each * layout.pipeline}` or more"
        if scheduled:
            enough = schedule_of_multiples(loaded, each * layout.pipeline)
        yield ConfigError(
            f"{'1 micro-batch is' if count == 1 else f'{count} micro-batches are'} fewer than the "
            f"pipeline's {layout.pipeline} processes",
            why="some processes would be idle in every step",
            hint=f"use {enough}, or a smaller micro-batch",
        )
    elif layout.schedule in {"interleaved", "zero-bubble"}:
        # All sizes of a ramp are multiples if the first two are.
        counts = [count, (ramp[0] + ramp[1]) // each] if len(ramp) == 3 else [count]
        counts += [size // each for size in scheduled]
        odd = [number for number in counts if number % layout.pipeline]
        if odd:
            yield _incomplete_group(loaded, layout, odd[0], each)


def _incomplete_group(
    loaded: LoadedConfig, layout: ParallelLayout, count: int, each: int
) -> LmcoreError:
    group = layout.pipeline * each
    lower = count // layout.pipeline * group
    hint = " or ".join(f"`--global-batch-size {size}`" for size in (lower, lower + group))
    if ramp := loaded.config.training.rampup_batch_size:
        start, increment = (max(group, round(size / group) * group) for size in ramp[:2])
        hint = (
            f"`--rampup-batch-size {start} {increment} {ramp[2]}`, a START and an INCREMENT that "
            f"are multiples of {group}"
        )
    elif loaded.config.training.step_batch_size_schedule:
        hint = schedule_of_multiples(loaded, group)
    article = "an interleaved" if layout.schedule == "interleaved" else "a zero-bubble"
    return ConfigError(
        f"{count} micro-batches are not a multiple of the pipeline's {layout.pipeline} processes",
        why=f"{article} schedule takes micro-batches in groups of that size",
        hint=f"use {hint}",
    )


def _graph_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Yield each setting with which `--step-graph` cannot capture forward and backward."""
    if not loaded.config.training.step_graph:
        return
    for name, why in _obstacles(loaded, layout):
        yield ConfigError(
            f"{loaded.shown('step_graph')} cannot be combined with {loaded.shown(name)}",
            why=why,
            hint="leave one of the two out",
        )


def _obstacles(loaded: LoadedConfig, layout: ParallelLayout) -> Iterator[tuple[str, str]]:
    config = loaded.config
    if not config.parallel.by_layout:
        yield "engine", "the other engine runs forward and backward itself"
        return
    if layout.tensor > 1:
        yield "tensor_model_parallel_size", _COLLECTIVES
    if layout.context > 1:
        yield "context_parallel_size", _COLLECTIVES
    if layout.pipeline > 1:
        yield "pipeline_model_parallel_size", _COLLECTIVES
    if layout.zero_stage:
        sharded = "zero_stage" if config.parallel.zero_stage else "use_distributed_optimizer"
        yield sharded, _COLLECTIVES
    if config.accelerator.recompute != "none":
        yield "recompute", "the host restores the random states for recomputation"
    if config.optimizer.optimizer == "sophia":
        yield "optimizer", "its Hessian estimate runs another pass with sampled labels"


def _known(loaded: LoadedConfig) -> Problems:
    name = loaded.config.parallel.engine
    engine = engine_named(name)
    if engine.open:
        return
    absent = absent_plugins()
    plugin = next((one for one in absent if one.engine == engine.name), None)
    if plugin is not None and plugin.is_installed:
        yield ConfigError(
            f"{loaded.shown('engine')} is not here",
            why=f"its package, `{plugin.package}`, is installed, but its plugin adds no engine",
            hint=f"{_native(loaded)}; `lmcore plugins` says why it is off or unusable",
        )
    elif plugin is not None:
        problem = plugin.missing(loaded.shown("engine"), all_of_it=True)
        problem.hint = f"{problem.hint}, or {_native(loaded)}"
        yield problem
    else:
        hint = suggestion(name, [*engines(), *(one.engine for one in absent)])
        yield ConfigError(
            f"{loaded.shown('engine')}: unknown engine",
            hint=f"{hint}; a plugin that brings others must be installed, see `lmcore plugins`",
        )


def _own_rules(loaded: LoadedConfig) -> Problems:
    yield from engine_named(loaded.config.parallel.engine).rules(loaded)


def _native(loaded: LoadedConfig) -> str:
    """Return the instruction that selects the native engine, for hints; it has no offload."""
    offload = " without `--cpu-offload`" * loaded.config.parallel.cpu_offload
    return f"use `--engine native`{offload}"


def _goes_with(loaded: LoadedConfig) -> Problems:
    """Refuse settings that the engine cannot have."""
    engine = engine_named(loaded.config.parallel.engine)
    for name, lack in beyond(engine, loaded.config).items():
        yield ConfigError(
            f"{loaded.shown(name)} cannot be combined with {loaded.shown('engine')}",
            why=lack.why,
            hint=f"{lack.instead or loaded.removal(name)}, or {_native(loaded)}",
        )


def _offload(loaded: LoadedConfig) -> Problems:
    """Refuse state in host memory with an engine that does not have it."""
    engine = engine_named(loaded.config.parallel.engine)
    if not loaded.config.parallel.cpu_offload or engine.offloads or not engine.open:
        return
    able = offloading()
    names = " or ".join(f"`--engine {one}`{brought}" for one, brought in able.items())
    lacks = ""
    for one in map(engine_named, able):
        others = [loaded.shown(name) for name in beyond(one, loaded.config)]
        if others:
            lacks += f", and {one.title}'s does not run {' and '.join(others)} here"
    yield ConfigError(
        f"{loaded.shown('cpu_offload')} needs {names}",
        why=f"the {engine.name} engine keeps the optimizer's state on the device{lacks}",
        hint=loaded.removal("cpu_offload") + ("" if lacks else f", or use {names}"),
    )


ENGINE_RULES: tuple[Rule, ...] = (_known, _own_rules, _goes_with, _offload)
