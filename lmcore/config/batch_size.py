"""The global batch size of every step: constant, or growing as `--rampup-batch-size` says.

The size of a step follows from the samples consumed before it alone, as Megatron counts: of the
samples of the ramp each size gets an equal share, from START on in steps of INCREMENT, and all
after them go by the final size.  A run that continues thus has the sizes of an unbroken one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BatchSizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Samples of each step over all processes.

    Attributes:
        final: After the ramp.
        start: At its beginning; *final* where there is none.
        increment: From one size to the next; divides *final* - *start*.
        ramp_samples: Samples until the final size; 0 where there is no ramp.
    """

    final: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def of(cls, final: int, ramp_up: tuple[int, ...] = ()) -> BatchSizes:
        """Return the sizes of a run.

        Args:
            final: The global batch size.
            ramp_up: START, INCREMENT and SAMPLES of `--rampup-batch-size`, or nothing.
        """
        return cls(final, *ramp_up) if ramp_up else cls(final, final)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step before which *consumed_samples* have been consumed."""
        if consumed_samples >= self.ramp_samples:
            return self.final
        return self.start + self._level(consumed_samples) * self.increment

    def steps(self, train_samples: int) -> int:
        """Return how many whole steps *train_samples* are enough for."""
        left, total = train_samples, 0
        for size, steps in self._phases(0):
            fit = left // size
            if steps is None or fit < steps:
                return total + fit
            left, total = left - steps * size, total + steps
        raise AssertionError("the last phase has no end")

    def samples(self, steps: int, consumed_samples: int = 0) -> int:
        """Return the samples of the *steps* steps that follow the first *consumed_samples*."""
        left, total = steps, 0
        for size, most in self._phases(consumed_samples):
            taken = left if most is None else min(left, most)
            left, total = left - taken, total + taken * size
            if not left:
                break
        return total

    def _level(self, consumed_samples: int) -> int:
        count = (self.final - self.start) // self.increment
        # In whole numbers: the quotient of two rounded ones may fall short at a boundary.
        return consumed_samples * count // self.ramp_samples

    def _phases(self, consumed: int) -> Iterator[tuple[int, int | None]]:
        """Yield each size from here on with the number of its steps; the final one's has no end."""
        while consumed < self.ramp_samples:
            count = (self.final - self.start) // self.increment
            level = self._level(consumed)
            end = -(-(level + 1) * self.ramp_samples // count)  # the first sample of the next size
            size = self.start + level * self.increment
            steps = -(-(end - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.final, None
