"""New directory for a result, which is complete or absent and replaces nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmcore.base.durable import atomic_directory
from lmcore.base.errors import CheckpointArgumentError, CheckpointError

__all__ = ["new_directory", "require_absent"]

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_OF_WRITES = _NO_SPACE | {errno.EFBIG}
"""Errors that no read has; `shutil` names the file that is copied in all of its errors."""


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
        needed: Smallest size of the result in bytes.

    Raises:
        CheckpointError: *target* exists, the disk is full or refuses, or the block failed to read a
            file elsewhere; nothing was written.
    """
    require_absent(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent, needed)
        with atomic_directory(target) as temporary, _reported(temporary, target, needed):
            yield temporary
    except OSError as error:
        raise _unwritten(target, needed, error) from error


@contextlib.contextmanager
def _reported(temporary: Path, target: Path, needed: int) -> Iterator[None]:
    """Report a failed read as one, and a failed write without the hint that is meant for runs."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        of_save = isinstance(error, OSError) or str(temporary) in error.what
        if not isinstance(cause, OSError) or not of_save:
            raise
        named = cause.filename
        elsewhere = isinstance(named, str | Path) and not _is_inside(Path(named), temporary)
        if elsewhere and cause.errno not in _OF_WRITES:
            why = cause.strerror or str(cause)
            raise CheckpointError(f"cannot read `{named}`", why=why) from cause
        raise _unwritten(target, needed, cause) from cause


def _is_inside(path: Path, directory: Path) -> bool:
    return path.absolute().is_relative_to(directory.absolute())


def _unwritten(target: Path, needed: int, error: OSError) -> CheckpointError:
    """Return the error of a disk that is full or refuses."""
    why, hint = error.strerror or str(error), "check the path and its permissions"
    if error.errno in _NO_SPACE:
        why += f": it needs at least {needed:,} bytes" if needed else ""
        hint = "free some space, or choose another disk"
        with contextlib.suppress(OSError):
            why += f", {shutil.disk_usage(target.parent).free:,} are free there"
    elif error.errno == errno.EFBIG:
        hint = "raise the limit of file sizes (`ulimit -f` shows it), or choose another disk"
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
