"""What can be wrong with a batch that grows, and with the loss scale: rules of `validate`."""

from __future__ import annotations

from collections.abc import Iterator

from lmcore.config.load import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["DYNAMIC_SCALE", "loss_scales", "ramp_up"]

Problems = Iterator[LmcoreError]

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""The options of a loss scale that is not fixed."""


def ramp_up(loaded: LoadedConfig, data_parallel_size: int) -> Problems:
    """A ramp has three numbers, ends at the global batch size, and every size of it divides."""
    asked = loaded.value("rampup_batch_size")
    if not asked:
        return
    shown = loaded.shown("rampup_batch_size")
    if len(asked) != 3:
        yield ConfigError(
            f"{shown} has {len(asked)} number{'s' if len(asked) > 1 else ''}",
            why="a ramp is given by the batch size that it starts with, by how much that grows at "
            "a time, and by the samples that it takes",
            hint="use `--rampup-batch-size START INCREMENT SAMPLES`",
        )
        return
    if loaded.value("train_samples") is None:
        yield ConfigError(
            f"{shown} needs `--train-samples`",
            why="steps of different sizes are counted in samples, as is the learning rate",
            hint="give the run's length, and that of warm-up and decay, in samples",
        )
    final = loaded.value("global_batch_size")
    if final is None:
        yield ConfigError(
            f"{shown} needs `--global-batch-size`",
            why="it is the batch size that the ramp ends with",
            hint="add `--global-batch-size N`",
        )
        return
    yield from _sizes(loaded, asked[0], asked[1], final)
    yield from _divisible(loaded, asked[0], asked[1], data_parallel_size)


def _sizes(loaded: LoadedConfig, start: int, increment: int, final: int) -> Problems:
    shown, shown_final = loaded.shown("rampup_batch_size"), loaded.shown("global_batch_size")
    if start >= final:
        yield ConfigError(
            f"{shown} starts with {start}, which is not less than {shown_final}",
            why="the batch grows from the one to the other",
            hint="start with less, or leave `--rampup-batch-size` out",
        )
    elif (final - start) % increment:
        below = start + (final - start) // increment * increment
        yield ConfigError(
            f"{shown} does not reach {shown_final} from {start} by {increment} at a time",
            why=f"it comes to {below} and then to {below + increment}",
            hint=f"use `--global-batch-size {below}` or {below + increment}, or an increment that "
            f"divides {final - start}",
        )


def _divisible(
    loaded: LoadedConfig, start: int, increment: int, data_parallel_size: int
) -> Problems:
    micro = loaded.value("micro_batch_size")
    together = micro * data_parallel_size
    odd = [size for size in (start, increment) if size % together]
    if not odd:
        return
    nearest = [max(together, round(size / together) * together) for size in (start, increment)]
    samples = loaded.value("rampup_batch_size")[2]
    yield ConfigError(
        f"{loaded.shown('rampup_batch_size')} has sizes that {together} does not divide, such as "
        f"{start if start % together else start + increment}",
        why=f"every step is so many micro-batches of {micro}, times the data-parallel size "
        f"({data_parallel_size})",
        hint=f"use `--rampup-batch-size {nearest[0]} {nearest[1]} {samples}`, or smaller "
        "micro-batches",
    )


def loss_scales(loaded: LoadedConfig) -> Problems:
    """A fixed loss scale has no dynamics; a dynamic one begins at its lowest or above."""
    if loaded.value("loss_scale"):
        for name in DYNAMIC_SCALE:
            if loaded.value(name) != loaded.options[name].default:
                yield ConfigError(
                    f"{loaded.shown(name)} does not go with {loaded.shown('loss_scale')}",
                    why="a fixed loss scale never changes",
                    hint="keep one of them",
                )
        return
    if loaded.value("initial_loss_scale") < loaded.value("min_loss_scale"):
        yield ConfigError(
            f"{loaded.shown('initial_loss_scale')} is less than {loaded.shown('min_loss_scale')}",
            why="the scale is never less than its lowest",
            hint="use a smaller `--min-loss-scale`; 1 is the default",
        )
