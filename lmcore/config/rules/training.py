"""Rules for the length of a run, its learning-rate schedule, its batch size and its profile."""

from __future__ import annotations

import dataclasses

from lmcore.base.errors import ConfigError, counted, host_memory
from lmcore.config.derived.batch_size import BatchSizes, read_schedule, schedule_flag
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.section.parallel import ENGINE_FILE
from lmcore.config.settings import LoadedConfig, Provenance

__all__ = [
    "DEFAULT_TRAIN_ITERS",
    "TRAINING_RULES",
    "batch_size_problems",
    "schedule_of_multiples",
    "scheduled_sizes",
    "train_iters",
    "with_micro_batch",
]

DEFAULT_TRAIN_ITERS = 1500
"""Steps of a run that is given neither `train_iters` nor `train_samples`."""


def train_iters(loaded: LoadedConfig, data_parallel_size: int | None) -> int | None:
    """Return the number of steps; None if it is not known yet, or the batch sizes are not valid.

    Args:
        loaded: The settings.
        data_parallel_size: Number of processes that see different samples; None if not known.
    """
    training = loaded.config.training
    if training.train_samples is None:
        return _steps(loaded)
    if training.step_batch_size_schedule:
        steps, _ = _schedule_of(loaded)
        return BatchSizes.of(0, (), steps).steps(training.train_samples) if steps else None
    batch, ramp = training.global_batch_size, training.rampup_batch_size
    if batch is None and data_parallel_size and not loaded.config.checkpoint.load:
        batch = training.micro_batch_size * data_parallel_size * (loaded.accumulation_steps or 1)
    if batch is None or (ramp and not _is_ramp(ramp, batch)):
        return None
    return BatchSizes.of(batch, ramp).steps(training.train_samples)


_Steps = tuple[tuple[int, int], ...]
"""The samples from which each size of a schedule holds, and the size."""


def _schedule_of(loaded: LoadedConfig) -> tuple[_Steps, ConfigError | None]:
    """Return the steps of the batch size schedule, or none and the problem with it."""
    words = loaded.config.training.step_batch_size_schedule
    if not words:
        return (), None
    try:
        return read_schedule(words, loaded.config.model.seq_length), None
    except ConfigError as problem:
        return (), problem


def _batch_schedule(loaded: LoadedConfig) -> Problems:
    """Refuse a batch size schedule that cannot be read, or with another batch size beside it."""
    yield from _exclude_each_other(loaded, "step_batch_size_schedule", "rampup_batch_size")
    steps, problem = _schedule_of(loaded)
    if problem is not None:
        problem.what = f"{loaded.shown('step_batch_size_schedule')}: {problem.what}"
        yield problem
    batch = loaded.config.training.global_batch_size
    if steps and batch not in (None, steps[-1][1]):
        yield ConfigError(
            f"{loaded.shown('step_batch_size_schedule')} does not end with "
            f"{loaded.shown('global_batch_size')}",
            why="the last size of the schedule is the global batch size",
            hint=loaded.removal("global_batch_size"),
        )


def _is_ramp(ramp: tuple[int, ...], final: int) -> bool:
    return len(ramp) == 3 and ramp[0] < final and (final - ramp[0]) % ramp[1] == 0


def _steps(loaded: LoadedConfig) -> int:
    return loaded.config.training.train_iters or DEFAULT_TRAIN_ITERS


def _exclude_each_other(loaded: LoadedConfig, first: str, second: str) -> Problems:
    """Yield a problem if two options are both set."""
    if all(loaded.value(name) not in (None, 0, ()) for name in (first, second)):
        yield ConfigError(
            f"{loaded.shown(first)} and {loaded.shown(second)} exclude each other",
            hint="keep one of them",
        )


def _length(loaded: LoadedConfig) -> Problems:
    yield from _exclude_each_other(loaded, "train_iters", "train_samples")
    training = loaded.config.training
    sizes = [*scheduled_sizes(loaded), *training.rampup_batch_size, training.global_batch_size]
    first = sizes[0]
    if first is not None:  # else it depends on the number of processes: see `_first_step`
        yield from _at_least_one_step(loaded, first)


def _at_least_one_step(loaded: LoadedConfig, first_batch: int) -> Problems:
    """Yield a problem if the run has fewer samples than *first_batch*."""
    samples = loaded.config.training.train_samples
    if samples is not None and samples < first_batch:
        yield ConfigError(
            f"{loaded.shown('train_samples')} is less than one step",
            why=f"a step takes {counted(first_batch, 'sample')}",
            hint=f"use `--train-samples {first_batch}` or more, or a smaller batch",
        )


def _schedule_units(loaded: LoadedConfig) -> Problems:
    """Require that the schedule counts in the unit of the run's length: steps or samples."""
    optimizer = loaded.config.optimizer
    if loaded.config.training.train_samples is not None:
        unit, instead = "train_samples", "samples"
        others = {
            "lr_decay_iters": optimizer.lr_decay_iters,
            "lr_warmup_iters": optimizer.lr_warmup_iters,
        }
    else:
        unit, instead = "train_iters", "iters"
        others = {
            "lr_decay_samples": optimizer.lr_decay_samples,
            "lr_warmup_samples": optimizer.lr_warmup_samples,
        }
    for name, value in others.items():
        if value:
            why = (
                f"the run's length is set by {loaded.shown(unit)}"
                if loaded.value(unit) is not None
                else "the run's length is counted in steps unless `train_samples` is given"
            )
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with `{unit}`",
                why=why,
                hint=f"use `{flag_of(name.rpartition('_')[0])}-{instead} N` in place of "
                f"`{flag_of(name)}`",
            )


def _warmup(loaded: LoadedConfig) -> Problems:
    yield from _exclude_each_other(loaded, "lr_warmup_fraction", "lr_warmup_iters")
    yield from _exclude_each_other(loaded, "lr_warmup_fraction", "lr_warmup_samples")
    optimizer, samples = loaded.config.optimizer, loaded.config.training.train_samples
    if samples is not None:
        unit, length = "samples", optimizer.lr_warmup_samples
        decay = optimizer.lr_decay_samples or samples
    else:
        unit, length = "iters", optimizer.lr_warmup_iters
        decay = optimizer.lr_decay_iters or _steps(loaded)
    if length > decay:
        yield ConfigError(
            f"{loaded.shown(f'lr_warmup_{unit}')} is longer than the decay of {decay}",
            why="the learning rate warms up within its decay",
            hint=f"use `--lr-warmup-{unit} {decay // 100}`, or a larger `--lr-decay-{unit}`",
        )


def _rates(loaded: LoadedConfig) -> Problems:
    optimizer = loaded.config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield ConfigError(
            f"{loaded.shown('min_lr')} exceeds {loaded.shown('lr')}",
            why="the rate decays from lr to min_lr",
            hint=f"use `--min-lr {optimizer.lr / 10:g}`, a tenth of `--lr`, or less",
        )


def _micro_batch(loaded: LoadedConfig) -> Problems:
    """Refuse a micro-batch whose token ids alone, int64, are larger than the host's memory."""
    samples, length = loaded.config.training.micro_batch_size, loaded.config.model.seq_length
    size, memory = 8 * samples * (length + 1), host_memory()
    if size > memory:
        given = [name for name in ("micro_batch_size", "seq_length") if loaded.given(name)]
        shown = " with ".join(loaded.shown(name) for name in given or ["micro_batch_size"])
        yield ConfigError(
            f"{shown} does not fit the memory of the host",
            why=f"{samples:,} samples of {length:,} tokens take {size / 2**30:,.0f} GiB; the host "
            f"has {memory / 2**30:,.0f} GiB",
            hint="use a smaller micro-batch or shorter samples; `--global-batch-size` sets the "
            "number of samples of a step",
        )


def _saved_schedule(loaded: LoadedConfig) -> Problems:
    names = ("schedule", "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    given = [name for name in names if loaded.value(name)]
    if len(given) > 1:
        yield from _exclude_each_other(loaded, *given[:2])


TRAINING_RULES: tuple[Rule, ...] = (
    *(_length, _batch_schedule, _schedule_units, _warmup, _rates, _micro_batch),
    _saved_schedule,
)


def batch_size_problems(loaded: LoadedConfig, data_parallel_size: int) -> Problems:
    """Yield what keeps the batch sizes from being whole micro-batches of every process.

    Args:
        loaded: The settings.
        data_parallel_size: Number of processes that see different samples.
    """
    training = loaded.config.training
    final, micro = training.global_batch_size, training.micro_batch_size
    each = micro * data_parallel_size
    if final is not None and final % each:
        lower = final // each * each
        choices = [f"`--global-batch-size {size}`" for size in (lower, lower + each) if size]
        if final % data_parallel_size == 0:
            share = final // data_parallel_size
            fits = max(size for size in range(1, micro) if share % size == 0)
            choices.insert(0, f"`--micro-batch-size {fits}`")
        yield ConfigError(
            f"global batch size ({final}) is not divisible by micro batch size ({micro}) "
            f"times data parallel size ({data_parallel_size})",
            why="every process runs the same number of micro-batches, "
            f"{counted(each, 'sample')} together",
            hint=" or ".join(filter(None, (", ".join(choices[:-1]), choices[-1]))),
        )
    yield from _first_step(loaded, each)
    yield from _ramp_up(loaded, data_parallel_size)
    yield from _scheduled_sizes(loaded, each)
    yield from _accumulation_steps(loaded, data_parallel_size)


def scheduled_sizes(loaded: LoadedConfig) -> list[int]:
    """Return the sizes of the batch size schedule; empty without one that can be read."""
    steps, _ = _schedule_of(loaded)
    return [size for _, size in steps]


def schedule_of_multiples(loaded: LoadedConfig, number: int) -> str:
    """Return the flag of the batch size schedule with the nearest sizes that *number* divides."""
    steps, _ = _schedule_of(loaded)
    near = [(start, max(number, round(size / number) * number)) for start, size in steps]
    return schedule_flag(near, loaded.config.model.seq_length)


def _scheduled_sizes(loaded: LoadedConfig, each: int) -> Problems:
    """Require that every size of the batch size schedule consists of whole micro-batches."""
    odd = [size for size in scheduled_sizes(loaded) if size % each]
    if odd:
        yield ConfigError(
            f"{loaded.shown('step_batch_size_schedule')} has sizes that {each} does not divide, "
            f"such as {odd[0]}",
            why=f"every process runs whole micro-batches, {counted(each, 'sample')} together",
            hint=f"use {schedule_of_multiples(loaded, each)}, or smaller micro-batches",
        )


def _first_step(loaded: LoadedConfig, each: int) -> Problems:
    """Yield a problem if the run has fewer samples than a step of all processes, by default."""
    training = loaded.config.training
    growing = training.rampup_batch_size or training.step_batch_size_schedule
    if training.global_batch_size is None and not growing:
        yield from _at_least_one_step(loaded, each * (loaded.accumulation_steps or 1))


def _ramp_up(loaded: LoadedConfig, data_parallel_size: int) -> Problems:
    training = loaded.config.training
    ramp, final = training.rampup_batch_size, training.global_batch_size
    if not ramp:
        return
    shown = loaded.shown("rampup_batch_size")
    if len(ramp) != 3:
        yield ConfigError(
            f"{shown} has {counted(len(ramp), 'number')}",
            why="a ramp has three: the first batch size, the increment, and the number of samples "
            "over which the batch size grows",
            hint="use `--rampup-batch-size START INCREMENT SAMPLES`",
        )
        return
    if final is None:
        yield ConfigError(
            f"{shown} needs `--global-batch-size`",
            why="that is the last batch size of the ramp",
            hint="add `--global-batch-size N`",
        )
        return
    start, increment, samples = ramp
    shown_final = loaded.shown("global_batch_size")
    if start >= final:
        yield ConfigError(
            f"{shown} starts with {start}, which is not less than {shown_final}",
            why="the batch size grows from START to the global batch size",
            hint=f"use a smaller START, or {loaded.removal('rampup_batch_size')}",
        )
    elif (final - start) % increment:
        below = start + (final - start) // increment * increment
        yield ConfigError(
            f"{shown} does not reach {shown_final} from {start} in steps of {increment}",
            why=f"the sizes are {below} and then {below + increment}",
            hint=f"use `--global-batch-size {below}` or {below + increment}, or an increment that "
            f"divides {final - start}",
        )
    micro = training.micro_batch_size
    each = micro * data_parallel_size
    if start % each or increment % each:
        near = [max(each, round(size / each) * each) for size in (start, increment)]
        yield ConfigError(
            f"{shown} has sizes that {each} does not divide, such as "
            f"{start if start % each else start + increment}",
            why=f"a batch consists of micro-batches of {counted(micro, 'sample')}, times the "
            f"data-parallel size ({data_parallel_size})",
            hint=f"use `--rampup-batch-size {near[0]} {near[1]} {samples}`, or smaller "
            "micro-batches",
        )


def _accumulation_steps(loaded: LoadedConfig, data_parallel_size: int) -> Problems:
    """Require that the batch sizes of an engine's file agree with each other and the settings."""
    training, steps = loaded.config.training, loaded.accumulation_steps
    if steps is None or training.global_batch_size is None:
        return
    product = training.micro_batch_size * steps * data_parallel_size
    if product != training.global_batch_size:
        yield ConfigError(
            f"{loaded.shown('global_batch_size')} is not {loaded.shown('micro_batch_size')} times "
            f"`gradient_accumulation_steps: {steps}` of {loaded.shown(ENGINE_FILE)} times "
            f"{counted(data_parallel_size, 'process', 'processes')}, which is {product}",
            why="every process runs the same number of micro-batches in a step",
            hint=f"{_write(loaded, product)}, or delete `gradient_accumulation_steps` from "
            f"`{loaded.config.parallel.engine_file}`: it follows from the other sizes",
        )


def _write(loaded: LoadedConfig, batch_size: int) -> str:
    """Return the instruction that sets a global batch size where it is set now."""
    file = loaded.config.parallel.engine_file
    if loaded.provenance["global_batch_size"].detail == f"{file}: train_batch_size":
        return f'write `"train_batch_size": {batch_size}` in `{file}`'
    return f"use `--global-batch-size {batch_size}`"


def with_micro_batch(loaded: LoadedConfig, data_parallel_size: int) -> LoadedConfig:
    """Return the settings with the micro-batch size that follows from an engine's file.

    The file may have the global batch size and the number of micro-batches only.

    Args:
        loaded: The settings.
        data_parallel_size: Number of processes that see different samples.
    """
    training, steps = loaded.config.training, loaded.accumulation_steps
    if steps is None or loaded.provenance["micro_batch_size"].kind != "default":
        return loaded
    batch, each = training.global_batch_size, steps * data_parallel_size
    if batch is None or batch % each:
        return loaded
    file = loaded.config.parallel.engine_file
    steps_of = f"gradient_accumulation_steps of {file}"
    origin = Provenance("derived", f"global_batch_size / ({steps_of} * data-parallel size)")
    training = dataclasses.replace(training, micro_batch_size=batch // each)
    return dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, training=training),
        provenance={**loaded.provenance, "micro_batch_size": origin},
    )


def profile_problems(
    loaded: LoadedConfig, *, world_size: int | None, train_iters: int | None
) -> Problems:
    """Yield what leaves a profile without a step or a rank.

    Args:
        loaded: The settings.
        world_size: Number of processes; None if it is not known yet.
        train_iters: Number of steps; None if it follows from the samples.
    """
    profile = loaded.config.profile
    if not profile.profile:
        return
    start, end = profile.profile_step_start, profile.profile_step_end
    if end <= start:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is not after {loaded.shown('profile_step_start')}",
            why="the profile covers the steps after the start, up to the end",
            hint=f"use `--profile-step-end {start + 2}` for two steps",
        )
    elif train_iters is not None and end > train_iters:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is after the last step, {train_iters}",
            why="the run ends before the profile does",
            hint=f"use `--profile-step-start {max(train_iters - 2, 0)} "
            f"--profile-step-end {train_iters}`, or train longer",
        )
    if not profile.profile_ranks:
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: no rank records a trace",
            hint="use `--profile-ranks 0`, or remove `--profile`",
        )
    beyond = [rank for rank in profile.profile_ranks if world_size and rank >= world_size]
    if beyond:
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: there is no rank {beyond[0]}",
            why=f"the run has {counted(world_size or 0, 'process', 'processes')}, counted from 0",
            hint="use `--profile-ranks 0`",
        )
