"""Comparison of checkpoints with their checksums, and the newest one that matches.

The ranks of a run verify a checkpoint together: each reads some of its files, and all of them get
the problems of all files.  So every byte is verified once, and all ranks take the same checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmcore.base.errors import CheckpointError
from lmcore.base.threads import map_in_threads
from lmcore.checkpoint.files.synced_file import file_checksum, num_io_threads
from lmcore.checkpoint.layout import Survey, file_size_problem
from lmcore.checkpoint.manifest import FileEntry, Manifest, read_manifest
from lmcore.runtime.process.channel import Channel

__all__ = [
    "MAX_THREADS",
    "VerifiedCheckpoint",
    "all_problems",
    "damaged",
    "identity",
    "newest_verified",
    "own_problems",
    "verify_checkpoint",
]

MAX_THREADS = 8
"""Number of files that one process reads at the same time, at most."""
_SHOWN = 10


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files match their checksums.

    Attributes:
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        passed_over: Damage of each checkpoint that is newer, or may be.
        note: Warning about a record of another checkpoint; see `Survey.note`.
    """

    path: Path
    manifest: Manifest
    passed_over: Mapping[Path, str]
    note: str | None = None

    def warning(self) -> str | None:
        """Return a warning that names the checkpoints passed over.

        If there are none, the note about `latest_checkpointed_iteration.txt`; None without one.
        """
        if not self.passed_over:
            return self.note
        listed = [f"  `{path.name}`: {why}" for path, why in self.passed_over.items()]
        if len(listed) > _SHOWN:
            listed[_SHOWN:] = [f"  and {len(listed) - _SHOWN} more"]
        what = f"damaged checkpoints in `{self.path.parent}` were passed over"
        taken = f"`{self.path.name}` is the newest whose files match their checksums"
        return "\n".join([f"{what}; {taken}:", *listed])


def newest_verified(
    found: Survey,
    *,
    channel: Channel | None = None,
    agree: Callable[[str], None] = lambda _identity: None,
) -> VerifiedCheckpoint:
    """Return the newest of the checkpoints whose files match their checksums.

    Args:
        found: Checkpoints to choose from, from `survey`.
        channel: Channel of the ranks of a run, which all must call this; None if this is the only
            process.
        agree: Called before a checkpoint is verified with its identity, and with "none" at the end
            of the list; raises an error unless all ranks call it with the same.

    Raises:
        CheckpointError: No checkpoint matches, *found* is one checkpoint that was named, or a newer
            lmcore wrote the newest.
        OtherRankError: Another rank failed.
    """
    channel = channel or Channel(None)
    found.require_known_format()
    problems = {path: error.what_and_why for path, error in found.unreadable.items()}
    for path, manifest in found.readable:
        agree(identity(path, manifest))
        wrong = all_problems(path, channel, partial(own_problems, path, manifest, channel))
        if not wrong:
            return VerifiedCheckpoint(path, manifest, problems, found.note())
        if found.explicit:
            raise damaged(path, wrong)
        problems[path] = "; ".join(wrong[:_SHOWN])
    agree("none")
    raise found.none_complete(problems)


def identity(checkpoint: Path, manifest: Manifest) -> str:
    """Return the name, save number and content of a checkpoint, which all ranks must agree on."""
    files = sorted((name, entry.crc32) for name, entry in manifest.files.items())
    content = zlib.crc32(json.dumps(files).encode())
    return f"`{checkpoint.name}`, save number {manifest.sequence}, content {content:08x}"


def verify_checkpoint(checkpoint: Path) -> list[str]:
    """Return the problems of the directory *checkpoint*; empty if there are none.

    Compares every file with its checksum, but loads no tensor.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [error.what_and_why]
    problems = own_problems(checkpoint, manifest, Channel(None))
    if problems:
        return problems
    from lmcore.checkpoint.dcp_metadata import read_metadata

    try:
        read_metadata(checkpoint, manifest)
    except CheckpointError as error:
        return [error.what_and_why]
    return []


def all_problems(checkpoint: Path, channel: Channel, own: Callable[[], list[str]]) -> list[str]:
    """Return the problems that all ranks found in a checkpoint; all ranks must call it.

    Args:
        checkpoint: Directory of the checkpoint.
        channel: Channel of the ranks.
        own: Returns the problems that this rank finds.
    """
    found: list[str] = channel.exchange(
        own,
        lambda parts: [[problem for part in parts for problem in part]] * len(parts),
        f"the files of checkpoint `{checkpoint.name}`",
    )
    return found


def own_problems(
    checkpoint: Path, manifest: Manifest, channel: Channel, *, content: bool = True
) -> list[str]:
    """Return the problems of the files that this rank verifies.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        channel: Channel of the ranks among which the files are divided.
        content: True to compare checksums; sizes are always compared.
    """
    names = sorted(manifest.files, key=lambda name: manifest.files[name].size)
    own = names[channel.rank :: channel.world_size]
    found = map_in_threads(
        lambda name: _file_problem(checkpoint / name, manifest.files[name], content=content),
        own,
        num_io_threads(MAX_THREADS),
    )
    return [problem for problem in found if problem is not None]


def damaged(checkpoint: Path, problems: list[str]) -> CheckpointError:
    """Return the error for a checkpoint with *problems*."""
    return CheckpointError(
        f"checkpoint `{checkpoint}` is damaged",
        why="\n".join(problems[:_SHOWN]),
        hint="use an earlier checkpoint, or restore this one from a copy",
    )


def _file_problem(path: Path, entry: FileEntry, *, content: bool) -> str | None:
    problem = file_size_problem(path, entry)
    if problem is not None or not content:
        return problem
    try:
        if file_checksum(path) != entry.crc32:
            return f"file `{path.name}` was altered: its content does not match its checksum"
    except OSError as error:
        return f"file `{path.name}` cannot be read: {error.strerror}"
    return None
