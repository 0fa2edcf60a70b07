"""Directory of checkpoints: names, complete checkpoints, and the newest one.

    checkpoints/iter_0000100/                   a checkpoint; there only when complete
    checkpoints/.iter_0000200.tmp-<process>/        being written, or left by a killed process
    checkpoints/.iter_0000100.replaced-<process>/   making room for a new save of that iteration
    checkpoints/.iter_0000050.deleted-<process>/    being deleted
    checkpoints/latest_checkpointed_iteration.txt   for users and scripts; compared, not trusted

Only the hidden names are ever removed, and only by the next save.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import is_abandoned
from lmcore.base.errors import CheckpointArgumentError, CheckpointError, nearest
from lmcore.checkpoint.manifest import (
    CONVERT_IT,
    MANIFEST_NAME,
    MEGATRON_FORMAT,
    FileEntry,
    Manifest,
    NewerFormatError,
    read_manifest,
    shortened,
)

__all__ = [
    "CHECKPOINTS_NAME",
    "LATEST_NAME",
    "HiddenDirectory",
    "Survey",
    "abandoned_notes",
    "complete_checkpoints",
    "file_size_problem",
    "find_checkpoint",
    "hidden_directories",
    "iteration_path",
    "no_such_directory",
    "parse_iteration",
    "size_problem",
    "survey",
]

CHECKPOINTS_NAME = "checkpoints"
LATEST_NAME = "latest_checkpointed_iteration.txt"

_ITERATION = re.compile(r"iter_(\d{7,})")
_HIDDEN = re.compile(r"\.iter_(\d{7,})\.(tmp|replaced|deleted)-([0-9a-f-]+)")
_HIDDEN_NOTE = re.compile(rf"\.{re.escape(LATEST_NAME)}\.tmp-[0-9a-f-]+")
_SHOWN = 10
_MAX_NOTE_BYTES = 64
_NO_DOWNLOAD = "a model of a hub is downloaded first (`hf download NAME --local-dir DIR`)"
_WANTED = "give a run directory, its `checkpoints`, or one `iter_XXXXXXX`"


@dataclass(frozen=True)
class HiddenDirectory:
    """A hidden directory that is not a checkpoint, or no longer; `purpose` is in its name.

    A link to a directory, which was in the place of a checkpoint, has the purpose `deleted`.
    """

    path: Path
    iteration: int
    purpose: str

    @property
    def abandoned(self) -> bool:
        """True if its process has ended."""
        return is_abandoned(self.path)


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
        if match and (path.is_symlink() or path.is_dir()):
            purpose = "deleted" if path.is_symlink() else match[2]
            yield HiddenDirectory(path, int(match[1]), purpose)


def abandoned_notes(checkpoints_dir: Path) -> list[Path]:
    """Return the temporary files of `latest_checkpointed_iteration.txt` of ended processes."""
    return [
        path
        for path in checkpoints_dir.iterdir()
        if _HIDDEN_NOTE.fullmatch(path.name) and is_abandoned(path)
    ]


def complete_checkpoints(checkpoints_dir: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints in *checkpoints_dir*, the most recently saved one first.

    Only the sizes of their files are compared; `newest_verified` compares the content, too.
    """
    found = _survey(checkpoints_dir).readable
    return [(path, manifest) for path, manifest in found if size_problem(path, manifest) is None]


@dataclass(frozen=True)
class Survey:
    """The checkpoints at a path, by their manifests alone.

    Attributes:
        path: Path that was given, or the directory of the checkpoints in it.
        explicit: True if the path is one checkpoint, which nothing may replace.
        readable: Checkpoints with a valid manifest, the most recently saved one first.
        unreadable: Error of each other checkpoint.
    """

    path: Path
    explicit: bool
    readable: Sequence[tuple[Path, Manifest]]
    unreadable: Mapping[Path, CheckpointError]

    def newest(self) -> tuple[Path, Manifest]:
        """Return the newest checkpoint whose files have the sizes in its manifest.

        Raises:
            CheckpointError: There is none, or a newer lmcore wrote the newest.
        """
        self.require_known_format()
        problems = {path: str(error.why) for path, error in self.unreadable.items()}
        for path, manifest in self.readable:
            problem = size_problem(path, manifest)
            if problem is None:
                return path, manifest
            if self.explicit:
                raise CheckpointError(
                    f"checkpoint `{path}` is not complete",
                    why=f"its {problem}",
                    hint="load an earlier checkpoint, or copy this one again",
                )
            problems[path] = f"its {problem}"
        raise self.none_complete(problems)

    def note(self) -> str | None:
        """Return a warning if `latest_checkpointed_iteration.txt` names another checkpoint.

        None if it names the newest one, or none that is there.
        """
        if self.explicit or not self.readable:
            return None
        noted, newest = _noted_iteration(self.path / LATEST_NAME), self.readable[0][1].iteration
        other = next((path for path, one in self.readable if one.iteration == noted), None)
        if other is None or noted == newest:
            return None
        return (
            f"`{self.path / LATEST_NAME}` names step {noted}, but the checkpoint saved last is of "
            f"step {newest}, and that one is loaded; `{other}` is the path of the other"
        )

    def require_known_format(self) -> None:
        """Raise an error if a newer lmcore wrote the newest checkpoint, which is not damaged.

        Raises:
            NewerFormatError: The newest checkpoint has a newer format.
        """
        newest = max((manifest.sequence for _, manifest in self.readable), default=-1)
        highest = max((manifest.iteration for _, manifest in self.readable), default=-1)
        for path, error in self.unreadable.items():
            if not isinstance(error, NewerFormatError):
                continue
            by_name = parse_iteration(path.name) or 0
            later = by_name > highest if error.sequence is None else error.sequence > newest
            if later:
                raise error

    def none_complete(self, problems: Mapping[Path, str]) -> CheckpointError:
        """Return the error if no checkpoint can be loaded; *problems* are by checkpoint."""
        if not problems:
            return CheckpointArgumentError(
                f"no checkpoint in `{self.path}`",
                why=f"looked for `iter_XXXXXXX` in `{self.path}` and in its `{CHECKPOINTS_NAME}`",
                hint=_WANTED,
            )
        if set(problems.values()) == {MEGATRON_FORMAT}:
            return CheckpointError(
                f"no checkpoint of lmcore in `{self.path}`",
                why=MEGATRON_FORMAT,
                hint=CONVERT_IT.format(shlex.quote(str(self.path))),
            )
        listed = [f"`{path.name}`: {problems[path]}" for path in sorted(problems)]
        return CheckpointError(
            f"no complete checkpoint in `{self.path}`",
            why="every one there is damaged:\n" + "\n".join(listed[:_SHOWN]),
            hint="copy them again from where they were saved, or load another run",
        )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at *path*: itself, or the newest complete one inside.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.

    The newest is the last one saved (the manifests count the saves), which after a return to an
    older checkpoint does not have the highest iteration.  Only the sizes of its files are compared
    with its manifest; `newest_verified` compares their content, too.

    Raises:
        CheckpointError: There is no such path, no checkpoint, or only incomplete ones.
    """
    return survey(path).newest()[0]


def survey(path: Path) -> Survey:
    """Read the manifests of the checkpoint at *path*, or of all checkpoints inside.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.

    Raises:
        CheckpointError: There is no such path, or it is one checkpoint without a valid manifest.
    """
    if not path.is_dir():
        raise no_such_directory(path)
    if parse_iteration(path.name) is not None or (path / MANIFEST_NAME).is_file():
        return Survey(path, explicit=True, readable=[(path, _read_named(path))], unreadable={})
    inside = path / CHECKPOINTS_NAME
    return _survey(inside if inside.is_dir() else path)


def size_problem(checkpoint: Path, manifest: Manifest) -> str | None:
    """Return the first file that is missing or of another size; None if all are complete."""
    problems = (
        file_size_problem(checkpoint / name, entry) for name, entry in manifest.files.items()
    )
    return next((problem for problem in problems if problem is not None), None)


def file_size_problem(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file of a checkpoint but its content; None if nothing is."""
    name = shortened(path.name)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return f"file `{name}` is missing"
    except OSError as error:
        return f"file `{name}` cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"file `{name}` is missing: it is a link, a directory or a device"
    if found.st_size != entry.size:
        return f"file `{name}` has {found.st_size} bytes instead of {entry.size}"
    return None


def _noted_iteration(path: Path) -> int | None:
    """Return the number in a `latest_checkpointed_iteration.txt`; None if it has none."""
    try:
        text = read_bounded_file(path, _MAX_NOTE_BYTES).strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _survey(directory: Path) -> Survey:
    try:
        candidates = _candidates(directory)
    except OSError as error:
        raise CheckpointError(f"cannot read `{directory}`", why=error.strerror) from error
    found: list[tuple[Path, Manifest]] = []
    problems: dict[Path, CheckpointError] = {}
    for entry in candidates:
        try:
            found.append((entry, _read_named(entry)))
        except CheckpointError as error:
            problems[entry] = error
    found.sort(key=lambda item: (item[1].sequence, item[1].iteration), reverse=True)
    return Survey(directory, explicit=False, readable=found, unreadable=problems)


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


def _read_named(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, whose iteration must be the directory's."""
    manifest = read_manifest(checkpoint)
    hidden = _HIDDEN.fullmatch(checkpoint.name)
    named = int(hidden[1]) if hidden else parse_iteration(checkpoint.name)
    if named is not None and named != manifest.iteration:
        raise CheckpointError(
            f"`{checkpoint}` is not the checkpoint of iteration {named}",
            why=f"its manifest is of iteration {shortened(str(manifest.iteration))}",
            hint=f"rename it to `{iteration_path(Path(), manifest.iteration)}` if that is right"
            if manifest.iteration < 10**12
            else "use an earlier checkpoint, or restore this one from a copy",
        )
    return manifest


def no_such_directory(path: Path, wanted: str = _WANTED) -> CheckpointArgumentError:
    """Return the error for a path that is no directory.

    Args:
        path: Path that a user named.
        wanted: Hint that says what to give.
    """
    if path.exists():
        return CheckpointArgumentError(
            f"`{path}` is a file, not a checkpoint",
            hint=wanted,
        )
    parent = path.parent
    if path.is_symlink():
        return CheckpointArgumentError(
            f"`{path}` is a symbolic link to nothing",
            why=f"`{path.readlink()}` does not exist",
            hint=wanted,
        )
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    close = nearest(path.name, siblings)
    is_name = len(path.parts) == 1 or (len(path.parts) == 2 and not parent.is_dir())
    wanted = f"{wanted}; {_NO_DOWNLOAD}" if is_name else wanted
    return CheckpointArgumentError(
        f"no such directory: `{path}`",
        why=None if parent.is_dir() else f"`{parent}` does not exist either",
        hint=f"did you mean `{parent / close}`?" if close else wanted,
    )
