"""Python's garbage collector under control: it runs between steps, at the same one everywhere.

Of itself Python looks through all its objects every now and then, for a tenth of a second and more,
in the middle of a step and in each process at another one; all others then wait in the next
exchange.  A step leaves next to nothing for it to find.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

__all__ = ["GarbageCollection"]


class GarbageCollection:
    """A context manager; within it garbage is collected where `at` says so.

    The first collection looks through everything, as Python does of itself; what stays then is not
    looked through again, so that the later ones take milliseconds.
    """

    def __init__(self, *, manual: bool, interval: int) -> None:
        """Change nothing yet.

        Args:
            manual: Whether to collect by hand; False leaves it to Python.
            interval: Steps between two collections; 0: none.
        """
        self._manual, self._interval = manual, interval
        self._enabled = self._began = self._frozen = False

    def at(self, done: int) -> None:
        """Take over at the first call; collect where *done* steps are a multiple of the interval.

        To be called between steps, not before the first one is done: it imports and compiles much.
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
        """Leave it to Python again."""
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()
