"""torch's layers without their own initialisation: `GPT.initialize` draws every weight.

Their random fill would be work thrown away, and on the meta device it imports torch's compiler,
1.2 s of a start.
"""

from __future__ import annotations

from torch import nn

__all__ = ["Embedding", "Linear"]


class Linear(nn.Linear):
    """A projection; parameters are uninitialised."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """A lookup table; parameters are uninitialised."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""
