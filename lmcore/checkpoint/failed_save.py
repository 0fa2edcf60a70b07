"""Error of a save that a full disk or another refusal of the system ended."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

from lmcore.base.errors import CheckpointError, unreadable

__all__ = ["failed_save"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def failed_save(
    checkpoints_dir: Path, iteration: int, needed: int, error: OSError
) -> CheckpointError:
    """Return the error of a save that the system refused.

    Args:
        checkpoints_dir: Directory of the checkpoints.
        iteration: Number of steps done.
        needed: Bytes that the checkpoint takes.
        error: Error of the system.
    """
    what = f"could not save the checkpoint of iteration {iteration} in `{checkpoints_dir}`"
    if error.errno not in _NO_SPACE:
        place = "" if error.filename is None else f": `{error.filename}`"
        return CheckpointError(
            what,
            why=f"{unreadable(error)}{place}",
            hint="earlier checkpoints are intact; choose another directory with `--save`",
        )
    why = f"{error.strerror}: it needs {needed:,} bytes"
    if error.errno == errno.EFBIG:
        return CheckpointError(
            what,
            why=f"{why}, and the file system or a limit of the process allows no file that large",
            hint="raise the limit (`ulimit -f` shows it) or choose another directory with "
            "`--save`; earlier checkpoints are intact",
        )
    advice = "free some space (`--keep-last N` deletes older checkpoints after each save)"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(checkpoints_dir).free
        why += f", {free:,} are free there"
        if free >= needed:
            why += "; so its inodes or a quota are used up"
            advice = "remove files (`df -i` shows the inodes), raise the quota"
    return CheckpointError(
        what,
        why=why,
        hint=f"{advice} or choose another directory with `--save`; earlier checkpoints are intact",
    )
