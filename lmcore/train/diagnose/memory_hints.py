"""Flags that reduce the memory of a run, in the order in which they are worth trying.

Each flag is compatible with the other settings of the run, and is shown with its cost or gain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import host_memory
from lmcore.config.derived.model_math import num_query_groups
from lmcore.config.engine import beyond, offloading
from lmcore.config.optimizers import optimizer_facts
from lmcore.contract.torch_device import device_count
from lmcore.model.family import family_of, stacks_of
from lmcore.model.training_engine import engine_named
from lmcore.train.diagnose.memory_breakdown import ROOMY, MemoryUse, in_units

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime

__all__ = ["host_remedies", "remedies"]

_LAST_STAGE = 3
_SHARDED_BY_SCHEDULE = {"zero-bubble": 2, "zero-bubble-v": 0}
"""Highest ZeRO stage of pipeline schedules that do not support stage 3."""
_TENSORS_KEPT = 4
"""Persistent values of a weight, at the most: the weight, its gradient, and two moments."""
_MUCH = 0.1
"""Least share of the device's memory at which other processes or fragmentation are mentioned."""


def remedies(
    plan: RunPlan, runtime: Runtime, use: MemoryUse, *, building: bool = False
) -> list[str]:
    """Return the remedies for a device out of memory, one line each, the most effective first.

    Args:
        plan: The run.
        runtime: Device and policies.
        use: Breakdown of the device's memory.
        building: True if the OOM came while the model was being built.
    """
    machine = _machine_memory(runtime, use)
    least = 2 * _weights(plan, runtime)
    if machine is not None and least > machine:
        does_not_fit = (
            f"none on this machine: weights and gradients of the model take {in_units(least)}, and "
            f"it has {in_units(machine)}"
        )
        return [*_of_others(use), does_not_fit, *_last(plan, runtime, use)]
    activations, kept = list(_activations(plan, runtime)), list(_kept(plan, runtime, use))
    if building or not use.fits_without_activations:
        lines = kept
    elif use.activations_lead:
        lines = [*activations, *kept]
    else:
        lines = [*kept, *activations]
    return [*_of_others(use), *lines, *_last(plan, runtime, use)]


def _weights(plan: RunPlan, runtime: Runtime) -> int:
    """Return the size of the weights of the whole model, in bytes."""
    width: int = getattr(torch, runtime.precision.keep).itemsize
    return plan.parameter_count * width


def _machine_memory(runtime: Runtime, use: MemoryUse) -> int | None:
    """Return the memory of all devices of this machine, in bytes; None if unknown.

    The processes of a host share its memory, so that more of them do not add any.
    """
    device = runtime.device
    if use.stats is None or not use.stats.total:
        return host_memory() if device.type == "cpu" else None
    return use.stats.total * (1 if device.type == "cpu" else device_count(device.type))


def _of_others(use: MemoryUse) -> Iterator[str]:
    if use.stats is None or not use.stats.total:
        return
    if use.others is not None and use.others > _MUCH * use.stats.total:
        yield f"other processes use {in_units(use.others)}: end them, or choose another device"
    holes = use.stats.reserved - use.stats.allocated
    expandable = "expandable_segments" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    if use.others is not None and holes > _MUCH * use.stats.total and not expandable:
        yield (
            f"{in_units(holes)} are reserved in fragments that are too small: "
            "`PYTORCH_ALLOC_CONF=expandable_segments:True`, if the device supports it"
        )


def _activations(plan: RunPlan, runtime: Runtime) -> Iterator[str]:
    """Yield remedies that make activations smaller."""
    micro, layout = plan.config.training.micro_batch_size, plan.layout
    if micro > 1:
        half = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        yield (
            f"`--micro-batch-size {half} --global-batch-size {plan.global_batch_size}`: "
            f"activations {micro // half} times smaller, the same steps"
        )
    yield from _recompute(plan, runtime)
    if layout.tensor > 1 and not layout.sequence and _sequence_divides(plan):
        yield f"`--sequence-parallel`: activations between layers are divided by {layout.tensor}"
    if layout.pipeline > 1 and layout.schedule == "gpipe":
        yield "`--pipeline-schedule 1f1b`: activations of no more micro-batches than stages"
    if runtime.precision.compute == "float32" and "bfloat16" in runtime.device.dtypes:
        yield "`--precision bf16`: activations of half the size"


def _sequence_divides(plan: RunPlan) -> bool:
    own = plan.config.model.seq_length // plan.layout.context
    return own % plan.layout.tensor == 0


def _recompute(plan: RunPlan, runtime: Runtime) -> Iterator[str]:
    name, placement = runtime.recompute.name, runtime.placement
    if name in {"none", "selective"}:
        yield "`--recompute full`: only the input of each layer is kept; a third more arithmetic"
    elif name == "full" and placement.method == "block":
        layers = sum(stack.num_layers for stack in stacks_of(plan.shape))
        if placement.num_layers < layers:
            yield f"`--recompute-method uniform`: all {layers} layers are recomputed"
    if name in {"none", "selective", "full"} and runtime.device.pin_memory is not None:
        yield "`--recompute full-offload`: the inputs of the layers are kept in host memory"


def _kept(plan: RunPlan, runtime: Runtime, use: MemoryUse) -> Iterator[str]:
    """Yield remedies that make weights, gradients and optimizer state smaller."""
    layout, asked = plan.layout, plan.config.parallel
    chosen, native = plan.config.optimizer, asked.by_layout
    optimizer = chosen.optimizer
    facts = optimizer_facts(optimizer, elementwise=chosen.optimizer_elementwise)
    shards = layout.data * layout.context // layout.replicas
    if native and shards > 1 and not facts.needs_whole:
        yield from _zero(plan, use, shards)
    if not native and (asked.zero_stage or 0) < _LAST_STAGE:
        yield f"`--zero-stage {_LAST_STAGE}`: weights are divided by {layout.data}, too"
    alone = layout.tensor == layout.pipeline == layout.context == layout.replicas == 1
    if alone and runtime.device.type != "cpu" and not asked.cpu_offload:
        for name, brought in offloading().items():
            if beyond(engine_named(name), plan.config).keys() <= {"zero_stage"}:
                flags = f"--engine {name} --zero-stage {asked.zero_stage or 2} --cpu-offload"
                yield f"`{flags}`{brought}: optimizer state in host memory; slower"
    total = use.stats.total if use.stats is not None else None
    weights = 4 * plan.parameter_count // layout.pipeline  # float32, also before they are built
    fits = total is None or weights < total  # else smaller moments do not help
    if fits and optimizer == "adam" and native and layout.tensor == 1 and not layout.zero_stage:
        yield "`--optimizer adam8bit`: moments of a quarter of the size"


def _zero(plan: RunPlan, use: MemoryUse, shards: int) -> Iterator[str]:
    """Yield the higher ZeRO stages that the pipeline schedule supports."""
    layout = plan.layout
    gradients = use.gradients.size + use.to_come
    saved = {
        1: (use.optimizer.size, "optimizer state is"),
        2: (use.optimizer.size + gradients, "gradients are, too,"),
        3: (use.optimizer.size + gradients + use.weights.size, "weights are, too,"),
    }
    already = saved[layout.zero_stage][0] if layout.zero_stage else 0
    for stage in range(layout.zero_stage + 1, _LAST_STAGE + 1):
        if layout.pipeline > 1 and stage > _SHARDED_BY_SCHEDULE.get(layout.schedule, _LAST_STAGE):
            return
        size, what = saved[stage]
        gain = in_units((size - already) * (shards - 1) / shards)
        yield f"`--zero-stage {stage}`: {what} divided by {shards}, {gain} less"


def _last(plan: RunPlan, runtime: Runtime, use: MemoryUse) -> Iterator[str]:
    """Yield remedies that need more devices or another model."""
    layout, total = plan.layout, use.stats.total if use.stats is not None else None
    if total is None and runtime.device.type == "cpu":
        total = host_memory()
    tensor, pipeline = layout.tensor, layout.pipeline
    each = _TENSORS_KEPT * _weights(plan, runtime)
    if total is None or each <= ROOMY * total * tensor * pipeline:
        found = next(_layouts(plan, least=2 * tensor * pipeline), None)
    else:
        layouts = _layouts(plan, least=each / (ROOMY * total))
        found = min(layouts, key=lambda sizes: sizes[0] * sizes[1], default=None)
    if found is not None:
        times = found[0] * found[1] // (tensor * pipeline)
        flags = f"--tensor-model-parallel-size {found[0]}" if found[0] > tensor else ""
        if found[1] > pipeline:
            flags += f" --pipeline-model-parallel-size {found[1]}"
        kind = "hosts" if runtime.device.type == "cpu" else "devices"
        often = "twice" if times == 2 else f"{times:,} times"
        parts = "halved" if times == 2 else f"divided by {times:,}"
        yield (
            f"`{flags.strip()}`, with {often} as many {kind}: weights and most activations {parts}"
        )
    smaller = "a smaller model"
    if total is not None and each > ROOMY * total * tensor * pipeline:
        fits = int(ROOMY * total * tensor * pipeline / each * plan.parameter_count)
        smaller += f"; one of about {fits:,} parameters fits"
    yield f"`--seq-length`, `--num-layers` or `--hidden-size`: {smaller}"


def _layouts(plan: RunPlan, least: float) -> Iterator[tuple[int, int]]:
    """Yield tensor and pipeline sizes that divide the model into at least so many parts.

    First the sizes of tensor parallelism with the present pipeline, then longer pipelines.
    """
    layout, model = plan.layout, plan.config.model
    heads, stacks = num_query_groups(model), [one.num_layers for one in stacks_of(plan.shape)]
    fewest = min(stacks) if len(stacks) > 1 else 0  # each has half of the stages
    layers = 2 * fewest or stacks[0]
    stages = [size for size in range(layout.pipeline, layers + 1) if layers % size == 0]
    no_others = not family_of(plan.shape).pipelines
    if layout.pipeline > 1 or not plan.config.parallel.by_layout or no_others:
        stages = [layout.pipeline]  # its schedule and its split stay
    for pipeline in stages or [layout.pipeline]:
        tensor = layout.tensor
        while heads % tensor == 0:
            if tensor * pipeline >= least:
                yield tensor, pipeline
                break
            tensor *= 2


def host_remedies(plan: RunPlan, runtime: Runtime) -> list[str]:
    """Return the remedies for a host out of memory.

    Args:
        plan: The run.
        runtime: Device and policies.
    """
    found = []
    if "offload" in runtime.recompute.name:
        found.append("`--recompute full`: inputs of layers stay on the device")
    if plan.config.parallel.cpu_offload:
        found.append("leave `--cpu-offload` out, or use more processes on more hosts")
    if plan.config.data.num_prefetch > 1:
        found.append("`--num-prefetch 1`: fewer batches wait on the host")
    if plan.config.checkpoint.async_save:
        found.append("`--no-async-save`: no copy of the weights waits on the host")
    return [*found, "fewer processes on this host, or one with more memory"]
