"""Directory of checkpoints: names, complete checkpoints, and the newest one.

    checkpoints/iter_0000100/                   a checkpoint; there only when complete
    checkpoints/.iter_0000200.tmp-<pid>/        being written, or left by a killed process
    checkpoints/.iter_0000100.replaced-<pid>/   making room for a new save of that iteration
    checkpoints/.iter_0000050.deleted-<pid>/    being deleted
    checkpoints/latest_checkpointed_iteration.txt   for people and scripts; never trusted here

Only the hidden names are ever removed, and only by the next save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcore.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from lmcore.errors import CheckpointError, nearest

__all__ = [
    "CHECKPOINTS_NAME",
    "LATEST_NAME",
    "HiddenDirectory",
    "complete_checkpoints",
    "find_checkpoint",
    "hidden_directories",
    "iteration_path",
    "parse_iteration",
]

CHECKPOINTS_NAME = "checkpoints"
LATEST_NAME = "latest_checkpointed_iteration.txt"

_ITERATION = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.iter_(\d{7,})\.(tmp|replaced|deleted)-(\d+)")
_SHOWN = 10
_WANTED = "give a run directory, its `checkpoints`, or one `iter_XXXXXXX`"


@dataclass(frozen=True)
class HiddenDirectory:
    """A hidden directory that is not a checkpoint, or no longer; `purpose` is in its name."""

    path: Path
    iteration: int
    purpose: str
    process: int

    @property
    def abandoned(self) -> bool:
        """True if its process has ended; this process leaves none behind on purpose."""
        if self.process == os.getpid():
            return True
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def iteration_path(checkpoints_dir: Path, iteration: int) -> Path:
    """Return the path of the checkpoint of *iteration* in *checkpoints_dir*."""
    return checkpoints_dir / f"iter_{iteration:07d}"


def parse_iteration(name: str) -> int | None:
    """Return the iteration in the directory name *name*, or None."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def hidden_directories(checkpoints_dir: Path) -> Iterator[HiddenDirectory]:
    """Yield the hidden directories of lmcore in *checkpoints_dir*, by name."""
    for path in sorted(checkpoints_dir.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield HiddenDirectory(path, int(match[1]), match[2], int(match[3]))


def complete_checkpoints(checkpoints_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints in *checkpoints_dir*, the most recently saved one first."""
    found, _problems = _survey(checkpoints_dir)
    return found


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at *path*: itself, or the newest complete one inside.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.

    The newest is the last one saved (the manifests count the saves), which after a return to an
    older checkpoint does not have the highest iteration.

    Raises:
        CheckpointError: There is no such path, no checkpoint, or only incomplete ones.
    """
    if not path.is_dir():
        raise _no_such_directory(path)
    if parse_iteration(path.name) is not None or (path / MANIFEST_NAME).is_file():
        _read_complete(path)
        return path
    inside = path / CHECKPOINTS_NAME
    directory = inside if inside.is_dir() else path
    found, problems = _survey(directory)
    if found:
        return found[0][0]
    if problems:
        listed = "\n".join(f"`{entry.name}`: {error.why}" for entry, error in problems[:_SHOWN])
        raise CheckpointError(
            f"no complete checkpoint in `{directory}`",
            why=f"every one there is incomplete:\n{listed}",
            hint="copy them again from where they were saved, or load another run",
        )
    raise CheckpointError(
        f"no checkpoint in `{path}`",
        why=f"looked for `iter_XXXXXXX` in `{path}` and in its `{CHECKPOINTS_NAME}`",
        hint=_WANTED,
    )


def _survey(
    directory: Path,
) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, CheckpointError]]]:
    try:
        candidates = _candidates(directory)
    except OSError as error:
        raise CheckpointError(f"cannot read `{directory}`", why=error.strerror) from error
    found: list[tuple[Path, Manifest]] = []
    problems: list[tuple[Path, CheckpointError]] = []
    for entry in candidates:
        try:
            found.append((entry, _read_complete(entry)))
        except CheckpointError as error:
            problems.append((entry, error))
    found.sort(key=lambda item: (item[1].sequence, item[1].iteration), reverse=True)
    return found, problems


def _candidates(directory: Path) -> list[Path]:
    visible = [
        entry
        for entry in sorted(directory.iterdir())
        if parse_iteration(entry.name) is not None and entry.is_dir()
    ]
    # A process killed between the two renames of a replacement leaves the older one hidden.
    replaced = [
        hidden.path
        for hidden in hidden_directories(directory)
        if hidden.purpose == "replaced" and not iteration_path(directory, hidden.iteration).exists()
    ]
    return visible + replaced


def _read_complete(checkpoint: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    for name, entry in manifest.files.items():
        path = checkpoint / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"checkpoint `{checkpoint}` is not complete",
                why=f"its file `{name}` is missing",
                hint="load an earlier checkpoint, or copy this one again",
            )
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"checkpoint `{checkpoint}` is not complete",
                why=f"its file `{name}` has {size} bytes instead of {entry.size}",
                hint="load an earlier checkpoint, or copy this one again",
            )
    return manifest


def _no_such_directory(path: Path) -> CheckpointError:
    if path.exists():
        return CheckpointError(
            f"`{path}` is a file, not a checkpoint",
            hint=_WANTED,
        )
    parent = path.parent
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    close = nearest(path.name, siblings)
    return CheckpointError(
        f"no such directory: `{path}`",
        why=None if parent.is_dir() else f"`{parent}` does not exist either",
        hint=f"did you mean `{parent / close}`?" if close else _WANTED,
    )
