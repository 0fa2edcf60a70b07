"""Path of one checkpoint from an argument of `lmcore checkpoint`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["checkpoint_at"]


def checkpoint_at(argument: str, step: str | None = None) -> Path:
    """Return the directory of one checkpoint.

    Args:
        argument: Run directory, its `checkpoints`, one `iter_XXXXXXX`, or a directory of another
            program.
        step: Step of the checkpoint, or `best`; None for the newest.

    Raises:
        CheckpointError: There is no checkpoint, or none of that step.
        ConfigError: A step was given for a checkpoint that has none.
    """
    from lmcore.checkpoint import chosen_checkpoint, find_checkpoint
    from lmcore.conversion.checkpoint_step import foreign_checkpoint
    from lmcore.conversion.formats import unrecognized
    from lmcore.model.checkpoint_format import format_of

    path = Path(argument)
    if step is not None and (chosen := foreign_checkpoint(path, step)) is not None:
        return chosen
    name = format_of(path) if path.is_dir() else None
    if name not in {None, "lmcore"}:
        return path
    if (problem := unrecognized(path)) is not None:
        raise problem
    return find_checkpoint(path) if step is None else chosen_checkpoint(path, step)
