"""New directories of a result: complete or absent, and nothing is replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmcore.durable import atomic_directory
from lmcore.errors import CheckpointArgumentError, CheckpointError

__all__ = ["new_directory", "require_absent"]

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def require_absent(target: Path) -> None:
    """Raise a `CheckpointArgumentError` if *target* cannot be a new or empty directory.

    Raises:
        CheckpointArgumentError: It exists and is not an empty directory, or is below a file.
    """
    above = next(path for path in target.absolute().parents if os.path.lexists(path))
    if not above.is_dir():
        raise CheckpointArgumentError(
            f"`{target}` cannot be made", why=f"`{above}` is no directory", hint="give another path"
        )
    if os.path.lexists(target) and not _is_empty(target):
        raise CheckpointArgumentError(
            f"`{target}` exists already",
            why="the result is a new directory, and nothing is replaced",
            hint="give another path, or remove it first",
        )


@contextlib.contextmanager
def new_directory(target: Path, needed: int = 0) -> Iterator[Path]:
    """Yield an empty directory that gets the name *target* if the block ends without an error.

    Args:
        target: Directory of the result; its parents are made.
        needed: Number of bytes that the result takes at least.

    Raises:
        CheckpointError: *target* exists, or the disk is full or refuses; nothing was written.
    """
    require_absent(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent, needed)
        with atomic_directory(target) as temporary:
            yield temporary
    except OSError as error:
        raise _unwritten(target, needed, error) from error
    except CheckpointError as error:
        # Of a save into the temporary directory, whose advice is that for a run.
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _NO_SPACE:
            raise
        raise _unwritten(target, needed, cause) from cause


def _unwritten(target: Path, needed: int, error: OSError) -> CheckpointError:
    """Return the error of a disk that is full or refuses."""
    why, hint = error.strerror or str(error), "check the path and its permissions"
    if error.errno in _NO_SPACE:
        why += f": it needs at least {needed:,} bytes" if needed else ""
        hint = "free some space, or choose another disk"
        with contextlib.suppress(OSError):
            why += f", {shutil.disk_usage(target.parent).free:,} are free there"
    return CheckpointError(f"cannot write `{target}`", why=why, hint=hint)


def _is_empty(path: Path) -> bool:
    """Return True if *path* is a directory without entries."""
    try:
        return not any(path.iterdir())
    except OSError:
        return False


def _require_space(directory: Path, needed: int) -> None:
    if shutil.disk_usage(directory).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
