"""The checkpoint that a command loads for generation."""

from __future__ import annotations

from pathlib import Path

from lmcore.errors import ConfigError

__all__ = ["require_checkpoint"]


def require_checkpoint(path: Path, step: str | None) -> Path:
    """Return the directory to load, before torch is loaded.

    Args:
        path: Path that the user named: a run, a checkpoint, or a directory of another format.
        step: Step of the checkpoint in a run, or `best`; None: the newest.

    Raises:
        CheckpointError, ConfigError: There is no such checkpoint.
    """
    from lmcore.checkpoint import chosen_checkpoint, find_checkpoint
    from lmcore.conversion.detect import format_of
    from lmcore.conversion.unrecognized import unrecognized

    if format_of(path) in {None, "lmcore"}:
        if (problem := unrecognized(path)) is not None:
            raise problem
        find_checkpoint(path)
        return path if step is None else chosen_checkpoint(path, step)
    if step is not None:
        raise ConfigError(
            f"`--ckpt-step` cannot be used with `{path}`",
            why="it is no run of lmcore",
            hint="name the directory of the checkpoint by `--load`",
        )
    return path
