"""Saves a checkpoint so that it is complete or absent, whatever happens on the way.

Everything is written and synced under a hidden name and appears with one rename; older
checkpoints are deleted only afterwards, and only under a hidden name too.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata as distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint.layout import (
    LATEST_NAME,
    complete_checkpoints,
    hidden_directories,
    iteration_path,
    parse_iteration,
)
from lmcore.checkpoint.manifest import (
    FORMAT_VERSION,
    JSON,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShapeValue,
    TensorEntry,
    encode_manifest,
    read_manifest,
)
from lmcore.checkpoint.synced_file import num_io_threads, write_durably
from lmcore.checkpoint.write_plan import Share, Writers, num_bytes
from lmcore.durable import hidden_path, publish_directory, sync_directory, write_atomically
from lmcore.errors import CheckpointError
from lmcore.runtime.process.channel import Channel

if TYPE_CHECKING:
    import torch

__all__ = ["save_checkpoint", "warm_up"]

logger = logging.getLogger(__name__)

_MAX_THREADS = 4
# Below this a second file and thread cost more than they save.
_BYTES_PER_THREAD = 16 * 1024 * 1024
# What the format adds to a tensor's own bytes, rounded up, and what the index adds once.
_OVERHEAD_PER_TENSOR = 4096
_OVERHEAD = 64 * 1024
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def warm_up() -> None:
    """Import what a first save would otherwise wait for, about a second."""
    importlib.import_module("lmcore.checkpoint.dcp_writer")


def save_checkpoint(
    checkpoints_dir: Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, JSON],
    *,
    model_shape: Mapping[str, ShapeValue],
    keep_last: int | None = None,
    share: Share | None = None,
    channel: Channel | None = None,
) -> Path:
    """Save *tensors* and *meta* as `iter_XXXXXXX` in *checkpoints_dir* and return that path.

    Args:
        checkpoints_dir: Made if absent.  One run at a time saves into it.
        iteration: Steps done.  A checkpoint of the same iteration is replaced, because a run that
            went back to an older one comes past it again and must not stop there.
        tensors: By distinct names, on any device; shared storage is written once per name given.
            With *share*: what `Share.views` returned, or copies of it.
        meta: JSON values (counters, schedule, data position), returned by `read_manifest`; those
            of rank 0 are saved.
        model_shape: What `check_shape` compares before a load.
        keep_last: How many checkpoints stay, this one included; older ones are deleted.
        share: What this process writes, where several do; None: everything.
        channel: Connects the processes of *share*, all of which must call this; None: it is alone.

    Raises:
        CheckpointError: the disk is full or refuses; earlier checkpoints are as they were.
        OtherRankError: So it is for another process, with its words.
        RunError: Another process has gone.
        ValueError, TypeError: what was passed is not plain tensors and JSON (a bug).
    """
    _check_arguments(iteration, tensors, keep_last)
    if share is None:
        share = Writers().share(tensors, {})
        tensors = share.views(tensors)
    manifest = _describe(iteration, share.tensors, meta, model_shape)
    encode_manifest(manifest)  # what is not JSON fails here, before anything is written
    channel = channel or Channel(None)
    save = _Save(checkpoints_dir, manifest, share, keep_last)
    about = f"the checkpoint of iteration {iteration}"
    temporary = channel.exchange(
        lambda: None,
        lambda parts: [str(save.prepare())] * len(parts),
        about,
        undo=save.remove,
    )
    target = channel.exchange(
        lambda: save.write(Path(temporary), tensors, channel.rank),
        lambda parts: [str(save.finish(parts))] * len(parts),
        about,
        undo=save.remove,
    )
    if channel.rank == 0:
        logger.info("saved %s", target)
    return Path(target)


class _Save:
    """One save; all but `write` happens on rank 0 alone."""

    def __init__(
        self, checkpoints_dir: Path, manifest: Manifest, share: Share, keep_last: int | None
    ) -> None:
        self.directory, self.manifest, self.share = checkpoints_dir, manifest, share
        self.keep_last = keep_last
        self.needed = _needed_bytes(share.tensors)
        self.temporary: Path | None = None
        self.earlier: list[tuple[Path, Manifest]] = []

    def prepare(self) -> Path:
        """Make room and return the new hidden directory."""
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            _clean_up(self.directory)
            _check_space(self.directory, self.needed)
            self.earlier = complete_checkpoints(self.directory)
            self.temporary = hidden_path(iteration_path(self.directory, self.manifest.iteration))
            self.temporary.mkdir()
        return self.temporary

    def write(
        self, temporary: Path, pieces: Mapping[str, torch.Tensor], rank: int
    ) -> dict[str, Any]:
        """Write this process's pieces; return files and places as JSON."""
        from lmcore.checkpoint.dcp_writer import write_pieces

        if not temporary.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see `{temporary}`, which rank 0 has made",
                hint="choose a directory with `--save` that all hosts of the run share",
            )
        with self._explained():
            written = write_pieces(
                temporary,
                [pieces[key] for key in self.share.own],
                rank=rank,
                num_threads=_num_threads(pieces),
            )
        return {
            "files": {name: [entry.size, entry.crc32] for name, entry in written.files.items()},
            "places": [[place.file, place.offset, place.length] for place in written.places],
        }

    def finish(self, parts: list[dict[str, Any]]) -> Path:
        """Write index and manifest, publish, and delete what is not to be kept."""
        assert self.temporary is not None, "prepare was called"
        with self._explained():
            target = self._publish(self.temporary, parts)
        iteration = self.manifest.iteration
        _note_latest(self.directory, iteration)
        if self.keep_last is not None:
            older = [
                path
                for path, _manifest in self.earlier
                if path != target and parse_iteration(path.name) is not None
            ]
            _delete(self.directory, older[self.keep_last - 1 :])
        return target

    def _publish(self, temporary: Path, parts: list[dict[str, Any]]) -> Path:
        from lmcore.checkpoint.dcp_metadata import METADATA_NAME
        from lmcore.checkpoint.dcp_writer import Place, write_index

        stored = [
            (name, box, Place(*place))
            for pieces, part in zip(self.share.pieces, parts, strict=True)
            for (name, box), place in zip(pieces, part["places"], strict=True)
        ]
        files = {name: FileEntry(*entry) for part in parts for name, entry in part["files"].items()}
        files[METADATA_NAME] = write_index(temporary, self.manifest.tensors, stored)
        sequence = 1 + max((other.sequence for _path, other in self.earlier), default=0)
        complete = replace(self.manifest, sequence=sequence, files=dict(sorted(files.items())))
        write_durably(temporary / MANIFEST_NAME, encode_manifest(complete))
        sync_directory(temporary)
        return _publish(self.directory, self.manifest.iteration, temporary)

    def remove(self) -> None:
        """Leave nothing of a save that failed."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _failed(self.directory, self.manifest.iteration, self.needed, error) from error


def _check_arguments(
    iteration: int, tensors: Mapping[str, torch.Tensor], keep_last: int | None
) -> None:
    import torch

    if iteration < 0:
        raise ValueError(f"iteration {iteration} is negative")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last {keep_last} would delete the checkpoint just saved")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise TypeError(f"`{name}` is not a plain tensor with values")


def _describe(
    iteration: int,
    tensors: Mapping[str, TensorEntry],
    meta: Mapping[str, JSON],
    model_shape: Mapping[str, ShapeValue],
) -> Manifest:
    import torch

    try:
        version = distribution.version("lmcore")
    except distribution.PackageNotFoundError:
        version = "0+uninstalled"
    return Manifest(
        format_version=FORMAT_VERSION,
        lmcore_version=version,
        torch_version=str(torch.__version__),
        iteration=iteration,
        sequence=0,
        model_shape=model_shape,
        meta=meta,
        tensors=tensors,
        files={},
    )


def _publish(checkpoints_dir: Path, iteration: int, temporary: Path) -> Path:
    target = iteration_path(checkpoints_dir, iteration)
    if (target.exists() or target.is_symlink()) and not _is_ours(target):
        _move_aside(target)
    publish_directory(temporary, target, replace=True)  # see layout for its hidden names
    return target


def _move_aside(target: Path) -> None:
    aside = next(
        path
        for number in range(1, 1_000_000)
        if not (path := target.with_name(f"{target.name}.aside-{number}")).exists()
    )
    logger.warning("%s is not a checkpoint of lmcore; moved to %s", target, aside.name)
    target.rename(aside)


def _is_ours(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return not path.is_symlink()


def _clean_up(checkpoints_dir: Path) -> None:
    for hidden in list(hidden_directories(checkpoints_dir)):
        if not hidden.abandoned:
            continue
        original = iteration_path(checkpoints_dir, hidden.iteration)
        if hidden.purpose == "replaced" and not original.exists():
            logger.warning("restored %s, left by a save that was cut short", original.name)
            hidden.path.rename(original)
            continue
        logger.warning("removed %s, left by a process that ended early", hidden.path.name)
        shutil.rmtree(hidden.path, ignore_errors=True)


def _note_latest(checkpoints_dir: Path, iteration: int) -> None:
    try:
        write_atomically(checkpoints_dir / LATEST_NAME, f"{iteration}\n".encode())
    except OSError as error:
        # For people and scripts only; the checkpoint itself is safe.
        logger.warning("could not update %s: %s", LATEST_NAME, error)


def _delete(checkpoints_dir: Path, checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        hidden = hidden_path(path, "deleted")
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            # The new checkpoint is safe; the next save tries again.
            logger.warning("could not delete the older checkpoint %s: %s", path, error)
    sync_directory(checkpoints_dir)


def _num_threads(tensors: Mapping[str, torch.Tensor]) -> int:
    wanted = sum(tensor.nbytes for tensor in tensors.values()) // _BYTES_PER_THREAD
    return max(1, min(num_io_threads(_MAX_THREADS), wanted))


def _needed_bytes(tensors: Mapping[str, TensorEntry]) -> int:
    own = sum(num_bytes(entry) for entry in tensors.values())
    return own + _OVERHEAD_PER_TENSOR * len(tensors) + _OVERHEAD


def _check_space(checkpoints_dir: Path, needed: int) -> None:
    if shutil.disk_usage(checkpoints_dir).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _failed(checkpoints_dir: Path, iteration: int, needed: int, error: OSError) -> CheckpointError:
    what = f"could not save the checkpoint of iteration {iteration} in `{checkpoints_dir}`"
    if error.errno not in _NO_SPACE:
        return CheckpointError(
            what,
            why=str(error),
            hint="earlier checkpoints are intact; choose another directory with `--save`",
        )
    try:
        free = f"{shutil.disk_usage(checkpoints_dir).free:,}"
    except OSError:
        free = "an unknown number of"
    return CheckpointError(
        what,
        why=f"{error.strerror}: it needs {needed:,} bytes, {free} are free there",
        hint="free some space (`--keep-last N` deletes older checkpoints after each save) or "
        "choose another directory with `--save`; earlier checkpoints are intact",
    )
