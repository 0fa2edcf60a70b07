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
    # A process killed between the two renames of a replacement leaves a hidden one.
    patterns = ("iter_*", ".iter_*.replaced-*")
    inside = [
        folder
        for place in (directory, directory / CHECKPOINTS_NAME)
        for pattern in patterns
        for folder in place.glob(pattern)
    ]
    return any((folder / MANIFEST_NAME).is_file() for folder in (directory, *inside))


FORMAT = CheckpointFormat(
    name="lmcore",
    title="lmcore",
    described="a run of lmcore",
    matches=_is_lmcore,
    read="lmcore.conversion.native.read:LmcoreState",
    write="lmcore.conversion.native.write:write_lmcore",
    optimizer=True,
    files=f"`iter_XXXXXXX/{MANIFEST_NAME}`, in it or in its `{CHECKPOINTS_NAME}`",
)
