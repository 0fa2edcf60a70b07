"""The lines that a run shows before its first step."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import counted
from lmcore.config.derived.model_math import num_query_groups
from lmcore.data.indexed.metadata import read_metadata
from lmcore.model.family import family_of, layers_in_words, stacks_of
from lmcore.parallel.pipeline_split import stages_in_words
from lmcore.train.compilation import compiles_blocks
from lmcore.train.diagnose.memory_breakdown import in_units

if TYPE_CHECKING:
    from lmcore.config.derived.data_source import TaskData
    from lmcore.config.plan import RunPlan
    from lmcore.config.section.model import ModelSection
    from lmcore.contract.precision.products import ModelProducts
    from lmcore.data.blend.sources import OpenSource
    from lmcore.optim.schedule import LearningRateSchedule
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets

__all__ = ["announcement", "header_lines"]

_INDENT = len("precision ")
_SHOWN_SOURCES = 3
_SHOWN_LABELS = 10


def announcement(
    plan: RunPlan,
    runtime: Runtime,
    datasets: RunDatasets,
    *,
    directory: Path,
    checkpoint: Path | None,
    step: int,
    schedule: LearningRateSchedule,
    products: ModelProducts | None = None,
) -> Iterator[str]:
    """Yield the lines that describe device, layout, model, data and length of a run.

    Args:
        plan: The run.
        runtime: Device and policies.
        datasets: Datasets of the run.
        directory: The run directory.
        checkpoint: The checkpoint that was loaded; None if the weights are initial.
        step: Number of steps that the run has behind it.
        schedule: Learning-rate schedule in force.
        products: Products of the model.
    """
    yield from _hardware(plan, runtime, products)
    model = plan.config.model
    yield (
        f"model     {family_of(plan.shape).name}, {plan.parameter_count:,} parameters: "
        f"{layers_in_words(plan.shape)}, hidden {model.hidden_size}, {_heads(model)}, "
        f"vocabulary {plan.vocab_size} padded to {plan.padded_vocab_size}"
    )
    yield f"data      {datasets.title}: {_training_data(plan, datasets)}"
    if plan.sources.task is not None:
        yield f"task      {_task(plan.sources.task)}"
    yield from _validation(plan, datasets)
    for name, each in datasets.sets.items():
        yield f"valid     {name}: {_own_sources(each.sources)}"
    if plan.sources.divided is None and datasets.test is not None:
        yield f"test      {_own_sources(datasets.sources['test'])}"
    sizes = plan.batch_sizes
    last = sizes.at(sizes.samples(plan.train_iters - 1))
    growing = f"{sizes.start} to " if last != sizes.start else ""
    start = f" from step {step} of {checkpoint}" if checkpoint else ""
    if checkpoint and plan.config.checkpoint.finetune:
        start = f", from the weights of {checkpoint}"
    yield (
        f"training  {counted(plan.train_iters, 'step')} of {growing}{last} x "
        f"{model.seq_length} tokens{start}"
    )
    if datasets.tasks:
        named = ", ".join(f"{one.task.name} ({len(one.examples):,})" for one in datasets.tasks)
        interval = plan.config.evaluation.eval_tasks_interval
        when = f"{_every(str(interval), 'step')} and " if interval else ""
        yield f"tasks     {named}: scored {when}at the end"
    yield f"schedule  {_schedule(plan, schedule)}"
    yield f"writing   {directory}{os.sep}"
    saving = plan.config.checkpoint
    times = [_every(str(saving.save_interval), "step")] if saving.save_interval else []
    if saving.save_interval_mins:
        times.append(_every(f"{saving.save_interval_mins:g}", "minute"))
    kept = ""
    if saving.save_interval_mins and saving.keep_last is None:
        weights = in_units(plan.parameter_count * getattr(torch, runtime.precision.keep).itemsize)
        state = " plus optimizer state" if saving.save_optim else ""
        which = "those by steps and the newest two" if saving.save_interval else "two"
        kept = f"; {which} are kept, each {weights}{state}"
    if saving.save_final:
        times.append("at the end" if times else "only at the end")
    shown = " and ".join([", ".join(times[:-1]), times[-1]] if times[1:] else times)
    yield f"saving    {shown or 'no checkpoint'}{kept}"


def _training_data(plan: RunPlan, datasets: RunDatasets) -> str:
    """Return the size of the training data; of all data if its documents are divided."""
    tokens, documents = datasets.token_count, datasets.document_count
    if plan.sources.divided is None:
        tokens, documents = _size(datasets.sources["train"])
    return f"{tokens:,} tokens, {datasets.tokenizer.name}, {counted(documents, 'document')}"


def _size(opened: Sequence[OpenSource]) -> tuple[int, int]:
    """Return the number of tokens and of documents in the ranges of sources."""
    tokens = sum(source.indexed.tokens_in(source.documents) for source in opened)
    return tokens, sum(end - start for start, end in (source.documents for source in opened))


def _own_sources(opened: Sequence[OpenSource]) -> str:
    """Return the names and the size of sources that belong to one part only."""
    names = [source.name for source in opened]
    more = f" and {len(names) - _SHOWN_SOURCES} more" if len(names) > _SHOWN_SOURCES else ""
    tokens, documents = _size(opened)
    shown = ", ".join(names[:_SHOWN_SOURCES])
    return f"{shown}{more}: {tokens:,} tokens, {counted(documents, 'document')}"


def _validation(plan: RunPlan, datasets: RunDatasets) -> Iterator[str]:
    """Yield the source and the share of the validation, if it may differ from the training data."""
    opened = datasets.sources.get("valid", ())
    if not plan.valid_samples or not opened:
        return
    if plan.sources.divided is None:
        yield f"valid     {_own_sources(opened)}"
        return
    _, count = _size(opened)
    total = sum(source.indexed.document_count for source in opened)
    share = f"{count:,} of {counted(total, 'document')} ({100 * count / total:.2g}%)"
    if len(opened) > 1:
        yield f"valid     {share}: a range of each of the {len(opened)} datasets"
        return
    metadata = read_metadata(opened[0].indexed.prefix)
    if metadata is not None and metadata.shuffle is None and (metadata.input_files or 1) > 1:
        start, end = opened[0].documents
        yield (
            f"valid     {share}: {start:,} to {end - 1:,}, in the order of its "
            f"{metadata.input_files} input files; `lmcore data prepare --shuffle SEED` mixes them"
        )


def _task(task: TaskData) -> str:
    if task.regression:
        return task.task
    if not task.labels:
        return f"{task.task}, {task.num_choices} choices"
    shown = ", ".join(task.labels[:_SHOWN_LABELS])
    more = f" and {len(task.labels) - _SHOWN_LABELS} more" * (len(task.labels) > _SHOWN_LABELS)
    return f"{task.task}, {len(task.labels)} classes: {shown}{more}"


def _every(number: str, unit: str) -> str:
    return f"every {unit}" if number == "1" else f"every {number} {unit}s"


def header_lines(line: str, width: int) -> str:
    """Return a line of the announcement wrapped between words, indented below its text."""
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _hardware(plan: RunPlan, runtime: Runtime, products: ModelProducts | None) -> Iterator[str]:
    device, processes = runtime.device, runtime.processes
    many = f", {plan.world_size} processes over {processes.backend.name}" if processes else ""
    yield f"device    {device.name} ({device.type}){many}"
    if processes:
        yield f"layout    {plan.layout.words}"
    if plan.layout.pipeline > 1:
        yield f"stages    {stages_in_words(stacks_of(plan.shape), plan.layout)}"
    # Tensor parallelism, and another engine's half-precision weights, replace or narrow the head.
    own_head = plan.layout.tensor == 1 and plan.config.parallel.by_layout
    wider = products.wider_words(head=own_head) if products else ""
    yield f"precision {runtime.precision.words}{wider}"
    if runtime.recompute.name != "none":
        yield f"recompute {runtime.recompute.name}: {runtime.recompute.summary}"
    if compiles_blocks(plan, device):
        asked = plan.config.training.compile
        why = "" if asked else ", as it pays on this device (`--no-compile`: it is not)"
        yield f"compile   each block{why}"
    if plan.config.training.step_graph:
        yield "graph     forward and backward of a micro-batch, captured once and replayed"


def _schedule(plan: RunPlan, schedule: LearningRateSchedule) -> str:
    """Return learning rate, warm-up and decay in words."""
    own = plan.lr_decay_samples, plan.lr_warmup_samples, schedule.start_samples
    kept = own != (schedule.decay_samples, schedule.warmup_samples, 0)

    def counted_steps(samples: float) -> str:
        unit = "sample"
        if not plan.batch_sizes.ramp_samples:
            samples, unit = samples / plan.global_batch_size, "step"
        return counted(math.floor(samples + 0.5), unit)

    words = f"learning rate {schedule.highest:g}, "
    if schedule.start_samples:
        words += f"restarted after {counted_steps(schedule.start_samples)}, "
    warmup = counted_steps(schedule.warmup_samples)
    words += "no warm-up" if warmup.startswith("0 ") else f"warm-up over {warmup}"
    if schedule.style == "constant":
        return f"{words}, then constant"
    end = f" after {counted_steps(schedule.start_samples + schedule.decay_samples)}" if kept else ""
    return f"{words}, {schedule.style} decay to {schedule.lowest:g}{end}"


def _heads(model: ModelSection) -> str:
    heads = counted(model.num_attention_heads, "head")
    if not model.group_query_attention:
        return heads
    return f"{heads} in {counted(num_query_groups(model), 'group')}"
