"""`Compilations`: programs that a device has compiled at one moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Compilations"]


@dataclass(frozen=True)
class Compilations:
    """Programs that a device has compiled in this process so far.

    Attributes:
        count: number of programs.
        seconds: time that their compilation took, in seconds.
    """

    count: int
    seconds: float

    def since(self, earlier: Compilations) -> Compilations:
        """Return the programs that were compiled after *earlier*."""
        return Compilations(self.count - earlier.count, self.seconds - earlier.seconds)
