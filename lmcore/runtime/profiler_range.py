"""`Span`: names parts of a step for a profile, at next to no cost where there is none.

`with span("forward"):` is how it is used.  Whoever may profile a run makes a span and passes it
down; everybody else passes `no_span`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["RANGES", "Span", "no_span"]

Span = Callable[[str], AbstractContextManager[Any]]
"""Returns a context for one of `RANGES`, which a profile shows under that name."""

RANGES = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
"""Parts of a run that have a name in its profile; docs/how-to/profile-a-run.md explains them."""

_NOTHING = contextlib.nullcontext()


def no_span(_name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return _NOTHING
