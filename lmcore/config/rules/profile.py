"""What can be wrong with the steps and processes that a run is to profile."""

from __future__ import annotations

from collections.abc import Iterator

from lmcore.config.load import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["profile_problems"]


def profile_problems(
    loaded: LoadedConfig, *, world_size: int, train_iters: int | None
) -> Iterator[LmcoreError]:
    """Yield what keeps a profile that is asked for from having a step, or a process.

    Args:
        loaded: The settings.
        world_size: Processes of the run.
        train_iters: Its steps; None where they follow from its samples.
    """
    if not loaded.value("profile"):
        return
    start, end = loaded.value("profile_step_start"), loaded.value("profile_step_end")
    if end <= start:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is not after {loaded.shown('profile_step_start')}",
            why="the profile is of the steps after the start, up to the end",
            hint=f"use `--profile-step-end {start + 2}` for two steps",
        )
    elif train_iters is not None and end > train_iters:
        yield ConfigError(
            f"{loaded.shown('profile_step_end')} is after the last step, {train_iters}",
            why="steps that the run does not have cannot be profiled",
            hint=f"use `--profile-step-start {max(train_iters - 2, 0)} "
            f"--profile-step-end {train_iters}`, or train longer",
        )
    beyond = [rank for rank in loaded.value("profile_ranks") if rank >= world_size]
    if beyond:
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: there is no rank {beyond[0]}",
            why=f"the run has {processes}, counted from 0",
            hint="use `--profile-ranks 0`",
        )
    if not loaded.value("profile_ranks"):
        yield ConfigError(
            f"{loaded.shown('profile_ranks')}: no process records a trace",
            hint="use `--profile-ranks 0`, or leave `--profile` out",
        )
