"""Global batch size of every step: constant, ramped up, or by a schedule of sizes.

The size of a step depends only on the samples consumed before it, as in Megatron: each size of a
ramp (`--rampup-batch-size`) gets an equal share of its samples, from START in steps of INCREMENT;
then the size is final.  A schedule (`--step-batch-size-schedule`) has the number of tokens from
which each size holds.  A run that continues therefore has the same sizes as an uninterrupted one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["BatchSizes", "batch_sizes", "read_schedule", "schedule_flag"]

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE]\+?(\d{1,2}))?([KMBT]?)", re.ASCII)
_HINT = (
    "use `--step-batch-size-schedule 0:SIZE TOKENS:SIZE`; TOKENS may be 250B, and there may be "
    "further steps"
)


def read_schedule(words: Iterable[str], seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return the samples from which each size of a schedule holds, and the size, in their order.

    Args:
        words: Values of `--step-batch-size-schedule`: entries TOKENS:SIZE, separated by blanks or
            commas within a value; the suffixes K, M, B and T are 10**3 to 10**12.
        seq_length: Tokens of a sample; a threshold within a sample counts from its start, as in
            Megatron.

    Raises:
        ConfigError: An entry has another form, the first threshold is not 0, or two thresholds
            are within one sample.
    """
    found = []
    for entry in " ".join(words).replace(",", " ").split():
        threshold, _, size = entry.partition(":")
        numbers = [_number(threshold), _number(size)]
        tokens, samples = numbers
        if tokens is None or not samples:
            raise ConfigError(
                f"`{entry}` is no step of a batch size schedule",
                why="a step is a number of tokens and the global batch size from there on",
                hint=_HINT,
            )
        found.append((tokens // seq_length, samples))
    found.sort(key=lambda step: step[0])
    if not found or found[0][0] != 0:
        raise ConfigError(
            "the batch size schedule has no size for the first step",
            why="the first threshold is not 0",
            hint=_HINT,
        )
    for (before, _), (after, _) in itertools.pairwise(found):
        if before == after:
            raise ConfigError(
                f"the batch size schedule has several sizes from sample {after:,} on",
                why=f"thresholds are rounded down to samples of {seq_length:,} tokens",
                hint=f"use {schedule_flag(dict(found).items(), seq_length)}",
            )
    return tuple(found)


def schedule_flag(steps: Iterable[tuple[int, int]], seq_length: int) -> str:
    """Return the flag, in backticks, that gives a schedule.

    Args:
        steps: Samples from which each size holds, and the size.
        seq_length: Tokens of a sample.
    """
    words = " ".join(f"{start * seq_length}:{size}" for start, size in steps)
    return f"`--step-batch-size-schedule {words}`"


def _number(text: str) -> int | None:
    """Return a number with or without a suffix, rounded down; None if the text is none."""
    match = _NUMBER.fullmatch(text.upper())
    if match is None:
        return None
    digits, exponent, suffix = match.groups()
    return int(Fraction(digits) * 10 ** int(exponent or 0) * _SUFFIXES.get(suffix, 1))


def batch_sizes(config: Config, final: int) -> BatchSizes:
    """Return the batch sizes of a run with valid settings.

    Args:
        config: All settings.
        final: Global batch size after a ramp, in samples.
    """
    training = config.training
    words = training.step_batch_size_schedule
    schedule = read_schedule(words, config.model.seq_length) if words else ()
    return BatchSizes.of(final, training.rampup_batch_size, schedule)


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size of each step, in samples over all processes.

    Attributes:
        final: Size after the ramp, or the last size of the schedule.
        start: Size of the first step; *final* without a ramp or schedule.
        increment: Difference between consecutive sizes; divides *final* - *start*.
        ramp_samples: Samples before the final size; 0 without a ramp or schedule.
        schedule: Result of `read_schedule`; empty without a schedule.
    """

    final: int
    start: int
    increment: int = 0
    ramp_samples: int = 0
    schedule: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        final: int,
        ramp_up: tuple[int, ...] = (),
        schedule: tuple[tuple[int, int], ...] = (),
    ) -> BatchSizes:
        """Return the batch sizes of a run.

        Args:
            final: Global batch size after the ramp, in samples; a schedule has its own.
            ramp_up: START, INCREMENT and SAMPLES of `--rampup-batch-size`; empty without a ramp.
            schedule: Result of `read_schedule`; empty without a schedule.
        """
        if schedule:
            last, size = schedule[-1]
            return cls(size, schedule[0][1], ramp_samples=last, schedule=schedule)
        start, increment, samples = ramp_up or (final, 0, 0)
        return cls(final, start, increment, samples)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size in its order; of a ramp the first two, which divide as all others do."""
        if self.schedule:
            return tuple(size for _, size in self.schedule)
        return (self.start, self.start + self.increment) if self.ramp_samples else (self.final,)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that follows *consumed_samples* consumed samples."""
        if consumed_samples >= self.ramp_samples:
            return self.final
        if self.schedule:
            return next(
                size for start, size in reversed(self.schedule) if start <= consumed_samples
            )
        return self.start + self._level(consumed_samples) * self.increment

    def steps(self, train_samples: int) -> int:
        """Return the number of whole steps in *train_samples* samples."""
        left, total = train_samples, 0
        for size, steps in self._phases(0):
            fit = left // size
            if steps is None or fit < steps:
                return total + fit
            left, total = left - steps * size, total + steps
        raise AssertionError("the last phase has no end")

    def samples(self, steps: int, consumed_samples: int = 0) -> int:
        """Return the samples in *steps* steps that follow *consumed_samples* consumed samples."""
        left, total = steps, 0
        for size, most in self._phases(consumed_samples):
            taken = left if most is None else min(left, most)
            left, total = left - taken, total + taken * size
            if not left:
                break
        return total

    def _level(self, consumed_samples: int) -> int:
        count = (self.final - self.start) // self.increment
        # Integer division: a quotient of rounded numbers may be too small at a boundary.
        return consumed_samples * count // self.ramp_samples

    def _phases(self, consumed: int) -> Iterator[tuple[int, int | None]]:
        """Yield each size from here on and its number of steps; None for the final size."""
        while consumed < self.ramp_samples:
            size = self.at(consumed)
            steps = -(-(self._end(consumed) - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.final, None

    def _end(self, consumed: int) -> int:
        """Return the first sample of the next size."""
        if self.schedule:
            return next(start for start, _ in self.schedule if start > consumed)
        count = (self.final - self.start) // self.increment
        return -(-(self._level(consumed) + 1) * self.ramp_samples // count)
