"""The checkpoint that a run continues from, found before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.config.plan import ResumePoint
from lmcore.errors import CheckpointError

if TYPE_CHECKING:
    from lmcore.config.section import CheckpointSection

__all__ = ["find_resume_point"]


def find_resume_point(settings: CheckpointSection) -> ResumePoint | None:
    """Return the checkpoint that `--load` names; None if the run starts from initial weights.

    Args:
        settings: The `checkpoint` section.

    Raises:
        CheckpointError: There is no checkpoint and the settings ask for one, or it is damaged.
    """
    if settings.load is None:
        return None
    from lmcore.checkpoint import find_checkpoint, read_manifest  # only if needed: it takes time

    path = Path(settings.load)
    try:
        checkpoint = find_checkpoint(path)
    except CheckpointError:
        first_start = settings.save is not None and Path(settings.save) == path
        may_be_missing = first_start or not settings.exit_on_missing_checkpoint
        if not may_be_missing or _holds_any(path):
            raise
        return None
    return ResumePoint(checkpoint, read_manifest(checkpoint))


def _holds_any(path: Path) -> bool:
    """Return True if a checkpoint is there, even a damaged one, which no run may ignore."""
    return path.name.startswith("iter_") or any(
        any(folder.glob("iter_*")) for folder in (path, path / "checkpoints")
    )
