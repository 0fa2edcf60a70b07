"""Choice of one checkpoint of a directory: by its step, or the best by validation loss."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lmcore.base.errors import CheckpointArgumentError, CheckpointError
from lmcore.checkpoint.layout import Survey, survey
from lmcore.checkpoint.manifest import Manifest
from lmcore.config.checkpoint_step import BEST, checkpoint_step, steps_in_words

__all__ = ["BEST_KEY", "best_of", "chosen_checkpoint"]

logger = logging.getLogger(__name__)

BEST_KEY = "best"
"""Key in a manifest's `meta` of a checkpoint that had the lowest validation loss of its run."""
_SHOWN = 20


def chosen_checkpoint(path: Path, choice: str) -> Path:
    """Return the checkpoint at *path* that `--ckpt-step` chooses.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.
        choice: Step of the checkpoint, or `best`; see `checkpoint_step`.

    Raises:
        CheckpointError: It is not there, or not readable.
        ConfigError: *choice* is neither.
    """
    step, found = checkpoint_step(choice), survey(path)
    if step is None:
        return _best(found)
    for checkpoint, manifest in found.readable:
        if manifest.iteration == step:
            return checkpoint
    for checkpoint, error in found.unreadable.items():
        if checkpoint.name.lstrip(".").partition(".")[0] == f"iter_{step:07d}":
            raise error
    steps = sorted(manifest.iteration for _, manifest in found.readable)
    raise CheckpointArgumentError(
        f"no checkpoint of step {step} in `{found.path}`",
        why=steps_in_words(steps) if steps else "it has no checkpoints",
        hint=f"use `--ckpt-step {min(steps, key=lambda other: abs(other - step))}`, or leave it "
        "out for the newest"
        if steps
        else None,
    )


def best_of(checkpoints: Sequence[tuple[Path, Manifest]]) -> Path | None:
    """Return the checkpoint that was marked last as the best one; None if none was.

    A run marks a checkpoint if its validation loss is the lowest so far, so the last one counts,
    also after a return to an earlier checkpoint.
    """
    marked = [(manifest.sequence, path) for path, manifest in checkpoints if _is_marked(manifest)]
    return max(marked, default=(0, None))[1]


def _is_marked(manifest: Manifest) -> bool:
    return manifest.meta.get(BEST_KEY) is True


def _best(found: Survey) -> Path:
    """Return the best of the readable checkpoints, with a warning if others are damaged."""
    best = best_of(found.readable)
    damaged = [f"`{path.name}`: {one.what_and_why}" for path, one in found.unreadable.items()]
    listed = "\n".join(damaged[:_SHOWN])
    if best is not None:
        if damaged:
            logger.warning(
                "`%s` is the best of the checkpoints in `%s` that are not damaged:\n%s",
                best.name,
                found.path,
                listed,
            )
        return best
    if damaged:
        raise CheckpointError(
            f"no readable checkpoint in `{found.path}` is marked as the best",
            why=f"the best one may be among those that are damaged:\n{listed}",
            hint="choose another by its step, `--ckpt-step N`",
        )
    raise CheckpointArgumentError(
        f"no checkpoint in `{found.path}` is marked as the best",
        why="no run with `--save-best` has validated there",
        hint=f"leave `--ckpt-step {BEST}` out for the newest, or give a step",
    )
