"""Control of Python's garbage collector: it runs between steps, on all ranks after the same step.

Left alone, Python traverses all its objects now and then, for a tenth of a second and more, in the
middle of a step and on each rank in another step; the other ranks then wait in the next collective.
A step leaves next to no garbage.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

__all__ = ["GarbageCollection"]


class GarbageCollection:
    """Context manager in which garbage is collected at an interval of steps.

    The first collection traverses all objects; the objects that remain are frozen, so that later
    collections take milliseconds.
    """

    def __init__(self, *, manual: bool, interval: int) -> None:
        """Change nothing yet.

        Args:
            manual: True to collect between steps; False to leave the collector to Python.
            interval: Number of steps between two collections; 0 for no collection.
        """
        self._manual, self._interval = manual, interval
        self._enabled = self._began = self._frozen = False

    def on_step(self, done: int) -> None:
        """Disable Python's collector at the first call; collect at multiples of the interval.

        To be called between steps, first after the first step, which imports and compiles much.

        Args:
            done: Number of steps done.
        """
        if not self._manual:
            return
        if not self._began:
            self._began, self._enabled = True, gc.isenabled()
            gc.disable()
        elif self._interval and done % self._interval == 0:
            gc.collect()
            if not self._frozen:
                self._frozen = True
                gc.freeze()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Enable Python's collector again."""
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()
