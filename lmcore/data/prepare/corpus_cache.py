"""Cache of prepared corpora: its entries with sizes and ages, and their removal.

An entry is a folder `DIR/corpora/KEY` that `lmcore.data.prepare.corpus` writes.  A process that
prepares it, or removes it, holds `DIR/corpora/KEY.lock`.  Runs set the modification time of the
folder to the time of their use.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.durable import hidden_path
from lmcore.base.errors import ConfigError
from lmcore.base.lock import LockFile, LockOwner
from lmcore.data.indexed.files import disk_errors

__all__ = [
    "CACHE_NAME",
    "CacheEntry",
    "cache_entries",
    "cache_folder",
    "entry_lock",
    "mark_used",
    "remove_entries",
]

CACHE_NAME = "corpora"
"""Folder of the prepared corpora in a cache."""
_KEY = re.compile(r"[0-9a-f]{32}")
_REMOVED = "removed"


@dataclass(frozen=True)
class CacheEntry:
    """Prepared corpus in a cache.

    Attributes:
        folder: Folder of its files, whose name is the key.
        name: Name of the corpus as in the names of the files; empty if there is none yet.
        size: Size of all files, in bytes.
        used: Time of its last use, in seconds since 1970.
        complete: False if its preparation is running, or was interrupted.
    """

    folder: Path
    name: str
    size: int
    used: float
    complete: bool

    @property
    def key(self) -> str:
        """Digest of content, tokenizer and settings."""
        return self.folder.name

    @property
    def owner(self) -> LockOwner | None:
        """The process that prepares it now; None if there is none."""
        owner = LockOwner.read(entry_lock(self.folder))
        return None if owner is None or owner.is_gone() else owner

    def remove(self) -> bool:
        """Remove the entry; return False if a process prepares it, or used it meanwhile.

        Raises:
            DataError: The file system refuses.
        """
        lock = LockFile(entry_lock(self.folder), note="its preparation was interrupted")
        with disk_errors(self.folder), lock.held() as is_held:
            if not is_held or self.folder.stat().st_mtime > self.used:
                return False
            # At once: an entry that is removed in part would look like an interrupted preparation.
            hidden = hidden_path(self.folder, _REMOVED)
            self.folder.rename(hidden)
            with contextlib.suppress(FileNotFoundError):  # another process removes what is left
                shutil.rmtree(hidden)
        return True


def cache_folder(directory: Path) -> Path:
    """Return the folder of the prepared corpora in a cache or in a run directory.

    Args:
        directory: Value of `--data-cache-path`, or a run directory.

    Raises:
        ConfigError: Neither has prepared corpora.
    """
    for folder in (directory / CACHE_NAME, directory / "data" / CACHE_NAME):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"`{directory}` has no prepared corpora",
        why=f"there is no folder `{directory / CACHE_NAME}`",
        hint="name the directory that runs have as `--data-cache-path`, or a run directory",
    )


def cache_entries(folder: Path) -> list[CacheEntry]:
    """Return the entries of a cache, the longest unused ones first.

    Args:
        folder: See `cache_folder`.

    Raises:
        DataError: The file system refuses.
    """
    with disk_errors(folder):
        found = [_entry(one) for one in folder.iterdir() if _KEY.fullmatch(one.name)]
    return sorted((one for one in found if one is not None), key=lambda one: one.used)


def _entry(folder: Path) -> CacheEntry | None:
    """Return the entry in a folder; None if it was removed meanwhile."""
    try:
        used, files = folder.stat().st_mtime, [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
    except (FileNotFoundError, NotADirectoryError):
        return None
    ends = [path.name.removesuffix(".meta.json") for path in files if ".meta.json" in path.name]
    names = ends or [path.name.partition(".")[0].lstrip(".") for path in files]
    return CacheEntry(folder, min(names, default=""), size, used, bool(ends))


def remove_entries(folder: Path, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Remove entries of a cache and return the removed ones; see `CacheEntry.remove`.

    Args:
        folder: See `cache_folder`.
        entries: Entries of it.

    Raises:
        DataError: The file system refuses.
    """
    for left in folder.glob(f".*.{_REMOVED}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    return [one for one in entries if one.remove()]


def entry_lock(folder: Path) -> Path:
    """Return the path of the lock file of an entry.

    Args:
        folder: Folder of the entry.
    """
    return folder.with_name(f"{folder.name}.lock")


def mark_used(folder: Path) -> None:
    """Record that a run uses an entry now, unless the cache cannot be written.

    Args:
        folder: Folder of the entry.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
