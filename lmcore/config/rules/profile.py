"""Rules for the steps and ranks of a profile."""

from __future__ import annotations

from lmcore.base.errors import ConfigError, counted
from lmcore.config.rules import Problems
from lmcore.config.settings import LoadedConfig

__all__ = ["profile_problems"]


def profile_problems(
    loaded: LoadedConfig, *, world_size: int | None, train_iters: int | None
) -> Problems:
    """Yield what leaves a profile without a step or a rank.

    Args:
        loaded: The settings.
        world_size: Number of processes; None if it is not known yet.
        train_iters: Number of steps; None if it follows from the samples.
    """
    profile = loaded.config.profile
    if not profile.profile:
        return
    start, end = profile.profile_step_start, profile.profile_step_end
    if end <= start:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is not after {loaded.shown('profile_step_start')}",
            why="the profile covers the steps after the start, up to the end",
            hint=f"use `--profile-step-end {start + 2}` for two steps",
        )
    elif train_iters is not None and end > train_iters:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is after the last step, {train_iters}",
            why="the run ends before the profile does",
            hint=f"use `--profile-step-start {max(train_iters - 2, 0)} "
            f"--profile-step-end {train_iters}`, or train longer",
        )
    if not profile.profile_ranks:
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: no rank records a trace",
            hint="use `--profile-ranks 0`, or remove `--profile`",
        )
    beyond = [rank for rank in profile.profile_ranks if world_size and rank >= world_size]
    if beyond:
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: there is no rank {beyond[0]}",
            why=f"the run has {counted(world_size or 0, 'process', 'processes')}, counted from 0",
            hint="use `--profile-ranks 0`",
        )
