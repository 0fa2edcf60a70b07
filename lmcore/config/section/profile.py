"""Which steps are profiled, and what of them is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class ProfileSection:
    """A trace of some steps, by torch's profiler."""

    profile: bool = option(
        False, "Record a trace of some steps into profile/ in the run directory."
    )
    profile_step_start: int = option(10, "Steps after which the profile begins.", minimum=0)
    profile_step_end: int = option(12, "Last step of the profile.", minimum=1)
    profile_ranks: tuple[int, ...] = option(
        (0,), "Processes that record a trace.", minimum=0, metavar="RANK"
    )
    profile_memory: bool = option(False, "Record allocations in the trace.")
    profile_shapes: bool = option(False, "Record the shapes of each op's inputs in the trace.")
    profile_stacks: bool = option(False, "Record the source line of each op in the trace.")
