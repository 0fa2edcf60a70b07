"""Profiler ranges: the named parts of a step in a profile, free of cost without a profiler.

Use: `with profiler_range("forward"):`.  `Profile` makes the range function of a run, which is
passed down to the code of the step; without a profiler that function is `no_range`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["RANGES", "ProfilerRange", "no_range"]

ProfilerRange = Callable[[str], AbstractContextManager[Any]]
"""A function that returns a context for one of `RANGES`, shown in a profile under its name."""

RANGES = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
"""Named parts of a step; docs/how-to/profile-a-run.md explains them."""

_NO_RANGE = contextlib.nullcontext()


def no_range(_name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return _NO_RANGE
