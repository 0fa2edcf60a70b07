"""Choice of one checkpoint in another program's directory by its step, without torch."""

from __future__ import annotations

import re
from pathlib import Path

from lmcore.base.errors import CheckpointArgumentError, ConfigError
from lmcore.config.checkpoint_step import BEST, checkpoint_step, steps_in_words
from lmcore.conversion.formats import incomplete
from lmcore.model.checkpoint_format import CheckpointFormat, formats

__all__ = ["foreign_checkpoint"]

_STEP = re.compile(r"(?:iter_|global_step)(\d+)")


def foreign_checkpoint(path: Path, choice: str, name: str | None = None) -> Path | None:
    """Return the checkpoint of another program at *path* that `--ckpt-step` chooses.

    Args:
        path: Directory that another program saved to, or one checkpoint in it.
        choice: Value of `--ckpt-step`.
        name: Name of the format; None: recognized by its files.

    Returns:
        Directory of the checkpoint; None if *path* has no checkpoint of another program.

    Raises:
        CheckpointArgumentError: There is no checkpoint of that step.
        ConfigError: *choice* is no step, or *path* has one model, without steps.
    """
    known = _asked(path, name) if path.is_dir() else None
    if known is None or known.name == "lmcore":
        return None
    if known.checkpoints is None:
        raise ConfigError(
            f"`--ckpt-step {choice}` cannot be used with `{path}`",
            why=f"it is {known.described}, without steps",
            hint="leave `--ckpt-step` out, or name the directory of another model",
        )
    found = list(known.checkpoints(path))
    if not found:
        return None
    step = checkpoint_step(choice)
    steps = {number: one for one in found if (number := _step_of(one)) is not None}
    if step is not None and step in steps:
        return steps[step]
    if step is not None and (problem := _incomplete(path, step)) is not None:
        raise problem
    others = [f"`{one.name}`" for one in found if _step_of(one) is None]
    raise _no_such_step(path, step, sorted(steps), others)


def _asked(path: Path, name: str | None) -> CheckpointFormat | None:
    """Return the format of a name or, without one, of the checkpoints in a directory."""
    if name is not None:
        return formats()[name]
    for one in formats().values():
        # Which step is asked for is known, so that no file needs to name the newest.
        if one.matches(path) if one.checkpoints is None else one.checkpoints(path):
            return one
    return None


def _step_of(checkpoint: Path) -> int | None:
    """Return the step in a directory's name; None if there is none, as in Megatron's `release`."""
    match = _STEP.fullmatch(checkpoint.absolute().name)
    return int(match[1]) if match else None


def _incomplete(path: Path, step: int) -> CheckpointArgumentError | None:
    """Return the error for a directory of that step without the files of a checkpoint."""
    for inside in sorted(path.iterdir()):
        if inside.is_dir() and _step_of(inside) == step:
            if (problem := incomplete(inside)) is not None:
                raise problem
            return CheckpointArgumentError(
                f"`{inside}` has no checkpoint",
                why="it has the files of no known format",
                hint="copy the files of all ranks into it, or choose another step",
            )
    return None


def _no_such_step(
    path: Path, step: int | None, steps: list[int], others: list[str]
) -> CheckpointArgumentError:
    """Return the error that lists the existing steps."""
    why = steps_in_words(steps, others)
    hint = "name the directory of the checkpoint instead of its step"
    if steps:
        nearest = steps[-1] if step is None else min(steps, key=lambda one: abs(one - step))
        hint = f"use `--ckpt-step {nearest}`, or leave it out for the newest"
    what = f"no checkpoint of step {step} in `{path}`"
    if step is None:
        what = f"no checkpoint in `{path}` is marked as the best"
        why = f"`--ckpt-step {BEST}` is for runs of lmcore with `--save-best`; {why}"
    return CheckpointArgumentError(what, why=why, hint=hint)
