"""`ExactSum`: a sum of floats without rounding, whatever their order, as `math.fsum`'s."""

from __future__ import annotations

import math

__all__ = ["ExactSum"]


class ExactSum:
    """Sum of floats that come one by one; it is rounded once, when it is read."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._parts: list[float] = []
        self._other = 0.0

    def add(self, value: float) -> None:
        """Add a float."""
        if not math.isfinite(value):
            self._other += value
            return
        # Shewchuk: parts that do not overlap, whose sum is exact.
        parts = []
        for part in self._parts:
            large, small = (value, part) if abs(value) >= abs(part) else (part, value)
            value = large + small
            if rest := small - (value - large):
                parts.append(rest)
        self._parts = [*parts, value]

    @property
    def value(self) -> float:
        """The sum."""
        return math.fsum([*self._parts, self._other])
