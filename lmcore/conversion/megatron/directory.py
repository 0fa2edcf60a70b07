"""Directories of Megatron's checkpoints: which checkpoint is the newest, and which files it has."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError, counted
from lmcore.conversion.directory_entries import sorted_entries

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState

__all__ = [
    "APART_NAME",
    "COMMON_NAME",
    "FORMAT_NAME",
    "TRACKER_NAME",
    "MegatronDirectory",
    "checkpoints_at",
    "directory_name",
    "find_checkpoint",
    "incomplete_megatron",
    "is_distributed",
    "is_megatron",
    "is_megatron_dist",
    "rank_count",
    "rank_files",
    "rank_name",
    "require_checkpoint",
    "require_ranks",
    "tracked_name",
]

TRACKER_NAME = "latest_checkpointed_iteration.txt"
COMMON_NAME = "common.pt"
FORMAT_NAME = "metadata.json"
_INDEX_NAME = ".metadata"
_TORCH_DIST = "torch_dist"
APART_NAME = "model_rng.pt"
"""Name of a rank's file of the first distributed optimizer, whose state is in separate files."""
_FILES = ("model_optim_rng.pt", APART_NAME)
"""Names of a rank's file."""
_ITERATION = re.compile(r"^(?:iter_\d{7,}|release)$")
_RANK = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_MAX_RANKS = 2**16
_MAX_TRACKER_BYTES = 1024
_MAX_FORMAT_BYTES = 64 * 1024
_SHOWN = 10


@dataclass(frozen=True)
class MegatronDirectory:
    """Files of one checkpoint.

    Attributes:
        path: Directory `iter_XXXXXXX` or `release`.
        ranks: Path of the file of each pair of tensor and pipeline rank.
    """

    path: Path
    ranks: Mapping[tuple[int, int], Path]

    @property
    def tensor_size(self) -> int:
        """Number of ranks of tensor parallelism."""
        return 1 + max(tensor for tensor, _ in self.ranks)

    @property
    def pipeline_size(self) -> int:
        """Number of stages."""
        return 1 + max(stage for _, stage in self.ranks)


def rank_name(tensor: int, stage: int, *, pipeline: bool) -> str:
    """Return the name of the directory of one rank.

    Args:
        tensor: Rank of tensor parallelism.
        stage: Stage of the pipeline.
        pipeline: True if there is more than one stage.
    """
    return f"mp_rank_{tensor:02d}_{stage:03d}" if pipeline else f"mp_rank_{tensor:02d}"


def directory_name(state: ModelState) -> str:
    """Return the name of the checkpoint's directory, `iter_XXXXXXX` or `release`.

    Args:
        state: Model to write.
    """
    progress = state.progress
    return "release" if progress is None else f"iter_{progress.iteration:07d}"


def tracked_name(state: ModelState) -> bytes:
    """Return the content of `latest_checkpointed_iteration.txt`.

    Args:
        state: Model to write.
    """
    progress = state.progress
    return b"release" if progress is None else str(progress.iteration).encode()


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints in a directory, by name; the directory alone if it is one itself.

    Args:
        path: Directory that Megatron saved to, or one checkpoint in it.
    """
    if _is_checkpoint(path):
        return [path]
    return [
        one for one in sorted_entries(path) if _ITERATION.match(one.name) and _is_checkpoint(one)
    ]


def find_checkpoint(path: Path) -> Path | None:
    """Return the newest checkpoint at *path*, which may be one itself; None if there is none.

    Args:
        path: Directory that Megatron saved to, or one `iter_XXXXXXX` or `release` in it.

    Raises:
        CheckpointError: There are several, and no file names the newest.
    """
    if _is_checkpoint(path):
        return path
    tracker = path / TRACKER_NAME
    if tracker.is_file():
        named = path / _tracked(tracker)
        return named if _is_checkpoint(named) else None
    found = checkpoints_at(path)
    if len(found) > 1:
        listed = ", ".join(f"`{one.name}`" for one in found[-_SHOWN:])
        raise CheckpointError(
            f"`{path}` does not say which checkpoint is the newest",
            why=f"it has no `{TRACKER_NAME}`, and {len(found)} checkpoints: {listed}",
            hint=f"name one of them, such as `{max(found)}`",
        )
    return found[0] if found else None


def require_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint at *path*; see `find_checkpoint`.

    Raises:
        CheckpointError: There is none, or several and no file names the newest.
    """
    found = find_checkpoint(path)
    if found is not None:
        return found
    tracker = path / TRACKER_NAME
    if not tracker.is_file():
        raise CheckpointArgumentError(
            f"`{path}` has no checkpoint of Megatron",
            why=f"looked for `mp_rank_*/{_FILES[0]}`, and for `{COMMON_NAME}` with "
            f"`{FORMAT_NAME}`, in it and in `iter_XXXXXXX` and `release` inside",
            hint="give the directory that `--save` of Megatron named, or one `iter_XXXXXXX` in it",
        )
    others = checkpoints_at(path)
    raise CheckpointError(
        f"the newest checkpoint of `{path}` is missing",
        why=f"`{TRACKER_NAME}` names `{_tracked(tracker)}`, which has no files of Megatron",
        hint=f"copy it, or give another one, such as `{max(others)}`" if others else "copy it",
    )


def is_megatron(directory: Path) -> bool:
    """Return True if *directory* has rank files of Megatron, or checkpoints that have them.

    Args:
        directory: Directory that Megatron saved to, or one checkpoint in it.
    """
    checkpoint = find_checkpoint(directory)
    return checkpoint is not None and not is_distributed(checkpoint)


def is_megatron_dist(directory: Path) -> bool:
    """Return True if *directory* is in Megatron's `torch_dist` format, or has such checkpoints.

    Args:
        directory: Directory that Megatron saved to, or one checkpoint in it.
    """
    checkpoint = find_checkpoint(directory)
    return checkpoint is not None and is_distributed(checkpoint)


def rank_files(path: Path) -> MegatronDirectory:
    """Return the files of all ranks of a checkpoint.

    Args:
        path: Directory of the checkpoint.

    Raises:
        CheckpointError: Ranks are missing, or it is of a model with experts.
    """
    ranks: dict[tuple[int, int], Path] = {}
    for entry in sorted_entries(path):
        match = _RANK.match(entry.name)
        file = next((entry / name for name in _FILES if (entry / name).is_file()), None)
        if match is None or file is None:
            continue
        if match[3] is not None:
            raise CheckpointError(
                f"lmcore does not have the model of `{path}`",
                why=f"`{entry.name}` is a part of a model with experts",
            )
        ranks[int(match[1]), int(match[2] or 0)] = file
    if not ranks:
        raise CheckpointError(
            f"`{path}` has no rank files",
            why=f"looked for `mp_rank_*/{_FILES[0]}`",
            hint="copy the directories of all ranks into it",
        )
    found = MegatronDirectory(path, ranks)
    require_ranks(found, found.tensor_size, found.pipeline_size)
    return found


def require_ranks(directory: MegatronDirectory, tensor: int, pipeline: int) -> None:
    """Raise a `CheckpointError` that names the ranks whose files are missing.

    Args:
        directory: Files that exist.
        tensor: Number of ranks of tensor parallelism.
        pipeline: Number of stages.
    """
    wanted = {(rank, stage) for rank in range(tensor) for stage in range(pipeline)}
    if wanted == directory.ranks.keys():
        return
    missing = sorted(wanted - directory.ranks.keys())
    names = [rank_name(*one, pipeline=pipeline > 1) for one in missing]
    surplus = sorted(directory.ranks[one].parent.name for one in directory.ranks.keys() - wanted)
    why = [f"missing: {', '.join(names[:10])}"] if names else []
    why += [f"surplus: {', '.join(surplus[:10])}"] if surplus else []
    raise CheckpointError(
        f"`{directory.path}` is not complete",
        why=f"tensor parallelism has {counted(tensor, 'rank')}, the pipeline "
        f"{counted(pipeline, 'stage')}; " + "; ".join(why),
        hint="copy the directories of all ranks into one; each node of a cluster may have its own",
    )


def rank_count(path: Path, name: str, value: object, default: int) -> int:
    """Return a number of ranks in the arguments of a run; *default* if it was not saved.

    Args:
        path: Directory of the checkpoint, for the message.
        name: Name of the argument.
        value: Its value.
        default: Number for a checkpoint that does not record it.

    Raises:
        CheckpointError: The value is not a number of ranks.
    """
    if value is None:
        return default
    if type(value) is int and 1 <= value <= _MAX_RANKS:
        return value
    raise CheckpointError(
        f"the arguments of `{path}` are not those of Megatron",
        why=f"`{name}` is `{value!s:.80}`, not a number of ranks",
    )


def is_distributed(path: Path) -> bool:
    """Return True if a checkpoint is in Megatron's `torch_dist` format.

    Args:
        path: Directory of the checkpoint.
    """
    if not all((path / name).is_file() for name in (FORMAT_NAME, _INDEX_NAME, COMMON_NAME)):
        return False
    return _backend(path) == _TORCH_DIST


def incomplete_megatron(path: Path) -> CheckpointError | None:
    """Return the error for a checkpoint that is incomplete, absent or not `torch_dist`.

    Args:
        path: Directory that Megatron saved to, or one checkpoint in it.
    """
    if (problem := _incomplete_distributed(path)) is not None:
        return problem
    if (path / TRACKER_NAME).is_file():
        try:
            require_checkpoint(path)
        except CheckpointError as error:
            return error
    return None


def _incomplete_distributed(path: Path) -> CheckpointError | None:
    """Return the error for a distributed checkpoint that is incomplete, or not `torch_dist`."""
    inside = [one for one in sorted_entries(path) if _ITERATION.match(one.name)]
    names = (FORMAT_NAME, _INDEX_NAME, COMMON_NAME)
    for checkpoint in (path, *reversed(inside)):
        missing = [name for name in names if not (checkpoint / name).is_file()]
        backend = _backend(checkpoint)
        if backend not in {None, _TORCH_DIST} and (checkpoint / COMMON_NAME).is_file():
            return CheckpointError(
                f"`{checkpoint}` has a format that is not read",
                why=f"`{FORMAT_NAME}` names the backend `{backend}` of Megatron",
                hint=f"save it by Megatron with `--ckpt-format {_TORCH_DIST}`",
            )
        if not missing and backend is None:
            empty = (checkpoint / FORMAT_NAME).stat().st_size == 0
            return CheckpointError(
                f"`{checkpoint / FORMAT_NAME}` is damaged",
                why=f"it is {'empty' if empty else 'something else'} instead of JSON with "
                "`sharded_backend`, which names the format of the other files",
                hint="copy the file again",
            )
        if len(missing) == 1:
            return CheckpointError(
                f"`{checkpoint}` is not complete",
                why=f"it is of Megatron (`torch_dist`) and lacks `{missing[0]}`",
                hint="copy all of its files again",
            )
    return None


def _backend(path: Path) -> str | None:
    """Return the backend of a distributed checkpoint; None without one."""
    try:
        content = json.loads(read_bounded_file(path / FORMAT_NAME, _MAX_FORMAT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    return backend if isinstance(backend, str) else None


def _is_checkpoint(path: Path) -> bool:
    return is_distributed(path) or any(
        _RANK.match(entry.name) and any((entry / name).is_file() for name in _FILES)
        for entry in sorted_entries(path)
    )


def _tracked(tracker: Path) -> str:
    """Return the name of the checkpoint that the tracker file names."""
    try:
        content = read_bounded_file(tracker, _MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{tracker}`", why=why) from error
    if content == "release":
        return content
    if not content.isascii() or not content.isdigit():
        raise CheckpointError(
            f"`{tracker}` is damaged",
            why=(f"it has `{content[:80]}`" if content else "it is empty")
            + " instead of an iteration or `release`",
            hint=_name_one(tracker.parent),
        )
    return f"iter_{int(content):07d}"


def _name_one(directory: Path) -> str:
    """Return the hint to name a checkpoint, with the last one in *directory* if there is any."""
    found = checkpoints_at(directory)
    return "name a checkpoint in the directory" + (f", such as `{max(found)}`" if found else "")
