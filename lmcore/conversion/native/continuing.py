"""Options that a run needs to continue from a converted checkpoint, and the notes about them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError
from lmcore.config.derived.batch_size import BatchSizes, read_schedule
from lmcore.config.option import flag_of
from lmcore.config.section import run_options

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState

__all__ = ["continue_flags", "continue_notes", "longer_flag", "shorter_length"]

_OWN_SCHEDULE, _NEW_OPTIMIZER = "--override-opt-param-scheduler", "--no-load-optim"
_LENGTHS = ("train_iters", "train_samples")


def longer_flag(state: ModelState) -> str | None:
    """Return the flag that makes a finished run longer; None if steps are left, or may be.

    Args:
        state: State that is written as a run.
    """
    progress, settings = state.progress, state.settings
    if progress is None:
        return None
    if settings.get("train_samples") is not None:
        done = progress.consumed_samples
        next_step = _batch_sizes(settings).at(done) if settings.get("global_batch_size") else 1
        return "--train-samples" if done + next_step > settings["train_samples"] else None
    length = settings.get("train_iters")
    return "--train-iters" if length is not None and progress.iteration >= length else None


def _batch_sizes(settings: Mapping[str, Any]) -> BatchSizes:
    ramp_up = tuple(settings.get("rampup_batch_size") or ())
    words = settings.get("step_batch_size_schedule")
    length = settings.get("seq_length")
    schedule: tuple[tuple[int, int], ...] = ()
    if words and length:
        with contextlib.suppress(ConfigError):  # of a file that lmcore did not write
            schedule = read_schedule(words, length)
    return BatchSizes.of(settings["global_batch_size"], ramp_up, schedule)


def shorter_length(state: ModelState) -> int | None:
    """Return the length of a training sample if the default exceeds the model's positions.

    None if the default fits, or if the state records a length.

    Args:
        state: State that is written as a run.
    """
    positions, default = state.shape.max_position_embeddings, run_options()["seq_length"].default
    assert isinstance(default, int)
    return positions if "seq_length" not in state.settings and positions < default else None


def continue_flags(state: ModelState) -> Mapping[str, str]:
    """Return the flags that `lmcore train --continue` needs, each with its reason.

    Args:
        state: State that is written as a run.
    """
    if state.progress is None:  # weights alone, from which a run starts with `--load`
        return {}
    found = {}
    if state.progress.schedule is None:
        found[_OWN_SCHEDULE] = "no learning-rate schedule was read"
    if len(state.kinds) == 1:
        found[_NEW_OPTIMIZER] = "the optimizer's state is not there"
    return found


def continue_notes(state: ModelState) -> list[str]:
    """Return notes about the flags, and about settings that the checkpoint does not record.

    Args:
        state: State that is written as a run.
    """
    if state.progress is None:
        return []
    flags = continue_flags(state)
    needed = [f"`{flag}`, as {reason}" for flag, reason in flags.items()]
    notes = []
    if needed:
        notes.append(f"to continue, `lmcore train --continue` needs {', and '.join(needed)}")
    names = ["seq_length", "global_batch_size"]
    names += [] if any(name in state.settings for name in _LENGTHS) else ["train_iters"]
    names += ["lr"] if _OWN_SCHEDULE in flags else []
    absent = [f"`{flag_of(name)}`" for name in names if name not in state.settings]
    if absent:
        shorter = shorter_length(state)
        length = "" if shorter is None else f" (`--seq-length {shorter}`, the model's positions)"
        notes.append(
            f"the checkpoint does not record {', '.join(absent)}: a run that continues has the "
            f"defaults{length} unless they are given"
        )
    return notes
