"""lmcore's own checkpoints and run directories, read and written as a `ModelState`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.checkpoint.manifest import MANIFEST_NAME
from lmcore.model.checkpoint_format import CheckpointFormat

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMAT"]


def _is_lmcore(directory: Path) -> bool:
    inside = directory / CHECKPOINTS_NAME
    folders = (directory, *directory.glob("iter_*"), *inside.glob("iter_*"))
    return any((folder / MANIFEST_NAME).is_file() for folder in folders)


FORMAT = CheckpointFormat(
    name="lmcore",
    title="lmcore",
    described="a run of lmcore",
    matches=_is_lmcore,
    read="lmcore.conversion.native.read:LmcoreState",
    write="lmcore.conversion.native.write:write_lmcore",
    optimizer=True,
)
