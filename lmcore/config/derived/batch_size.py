"""Global batch size of every step: constant, or ramped up by `--rampup-batch-size`.

The size of a step depends only on the samples consumed before it, as in Megatron: each size of the
ramp gets an equal share of its samples, from START in steps of INCREMENT; then the size is final.
A run that continues therefore has the same sizes as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BatchSizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size of each step, in samples over all processes.

    Attributes:
        final: Size after the ramp.
        start: Size of the first step; *final* without a ramp.
        increment: Difference between consecutive sizes; divides *final* - *start*.
        ramp_samples: Samples before the final size; 0 without a ramp.
    """

    final: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def of(cls, final: int, ramp_up: tuple[int, ...] = ()) -> BatchSizes:
        """Return the batch sizes of a run.

        Args:
            final: Global batch size after the ramp, in samples.
            ramp_up: START, INCREMENT and SAMPLES of `--rampup-batch-size`; empty without a ramp.
        """
        return cls(final, *ramp_up) if ramp_up else cls(final, final)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that follows *consumed_samples* consumed samples."""
        if consumed_samples >= self.ramp_samples:
            return self.final
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
            count = (self.final - self.start) // self.increment
            level = self._level(consumed)
            end = -(-(level + 1) * self.ramp_samples // count)  # the first sample of the next size
            size = self.start + level * self.increment
            steps = -(-(end - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.final, None
