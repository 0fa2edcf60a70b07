"""Settings of the run that wrote a checkpoint, from its manifest."""

from __future__ import annotations

from pathlib import Path

from lmcore.config.file.saved_settings import SavedSettings
from lmcore.errors import CheckpointError
from lmcore.train.resume.saved_meta import part_of

__all__ = ["read_saved_settings"]


def read_saved_settings(path: Path) -> SavedSettings:
    """Return the settings in the newest checkpoint at *path*.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.

    Raises:
        CheckpointError: There is no checkpoint, or it records no settings.
    """
    from lmcore.checkpoint import survey  # only if needed: it takes time

    checkpoint, manifest = survey(path).newest()
    config, sources = (part_of(manifest.meta, "config", name) for name in ("config", "sources"))
    if not config:
        raise CheckpointError(
            f"checkpoint `{checkpoint}` does not record the settings of its run",
            why="its manifest has no `meta.config`",
            hint="give the settings as flags or in a file, and the checkpoint by `--load`",
        )
    return SavedSettings(str(checkpoint), config, sources)
