"""Section `profile`: steps and ranks to profile, and what a trace records."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import setting
from lmcore.config.option import FREE, option

_PROFILE = setting("--profile")


@dataclass(frozen=True)
class ProfileSection:
    """Trace of some steps by torch's profiler."""

    profile: bool = option(
        False, "Record a trace of some steps to profile/ in the run directory.", on_resume=FREE
    )
    profile_step_start: int = option(
        10, "Number of steps before the profile starts.", minimum=0, on_resume=FREE, needs=_PROFILE
    )
    profile_step_end: int = option(
        12, "Last step in the profile.", minimum=1, on_resume=FREE, needs=_PROFILE
    )
    profile_ranks: tuple[int, ...] = option(
        (0,),
        "Ranks that record a trace.",
        minimum=0,
        metavar="RANK",
        on_resume=FREE,
        needs=_PROFILE,
    )
    profile_memory: bool = option(
        False, "Record memory allocations in the trace.", on_resume=FREE, needs=_PROFILE
    )
    profile_shapes: bool = option(
        False, "Record the shapes of each op's inputs in the trace.", on_resume=FREE, needs=_PROFILE
    )
    profile_stacks: bool = option(
        False, "Record the source line of each op in the trace.", on_resume=FREE, needs=_PROFILE
    )
