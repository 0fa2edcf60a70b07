"""Saves a checkpoint so that it is complete or absent, whatever happens on the way.

All files are written and synced in a directory with a hidden name, which appears by one rename;
older checkpoints are deleted only afterwards, also under a hidden name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata as distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.durable import hidden_path, publish_directory, sync_directory, write_atomically
from lmcore.base.errors import CheckpointError, RunError
from lmcore.checkpoint.choice import BEST_KEY, best_of
from lmcore.checkpoint.failed_save import failed_save
from lmcore.checkpoint.files.synced_file import num_io_threads, write_durably
from lmcore.checkpoint.layout import (
    LATEST_NAME,
    abandoned_notes,
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
from lmcore.checkpoint.write_plan import WritePlan, WritePlanner, num_bytes
from lmcore.runtime.process.channel import Channel

if TYPE_CHECKING:
    import torch

    from lmcore.checkpoint.dcp_writer import Written

__all__ = ["TIMED", "save_checkpoint", "save_streamed"]

logger = logging.getLogger(__name__)

TIMED = "timed"
"""Key in a manifest's `meta` of a checkpoint by time, or for its validation loss alone, which the
second save after it deletes."""
_MAX_THREADS = 4
_STREAMS = 2  # threads of `save_streamed`, each with one tensor in memory
# Below this a second file and thread cost more than they save.
_BYTES_PER_THREAD = 16 * 1024 * 1024
# Bytes that the format adds to a tensor, rounded up, and bytes of the index.
_OVERHEAD_PER_TENSOR = 4096
_OVERHEAD = 64 * 1024


def save_checkpoint(
    checkpoints_dir: Path,
    iteration: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, JSON],
    *,
    model_shape: Mapping[str, ShapeValue],
    keep_last: int | None = None,
    keep_every: int | None = None,
    damaged: Collection[Path] = (),
    plan: WritePlan | None = None,
    channel: Channel | None = None,
    failure: Exception | None = None,
) -> Path:
    """Save *tensors* and *meta* as `iter_XXXXXXX` in *checkpoints_dir* and return that path.

    Args:
        checkpoints_dir: Directory of the checkpoints, created if absent.  One run at a time saves
            into it.
        iteration: Number of steps done.  A checkpoint of the same iteration is replaced: a run that
            went back to an older one saves it again.
        tensors: Tensors by name, on any device; shared storage is written once per name.  With
            *plan*: the result of `WritePlan.views`, or copies of it.
        meta: JSON values (counters, schedule, data position), returned by `read_manifest`; rank 0
            saves its own.
        model_shape: Shape of the model, which `check_shape` compares before a load.
        keep_last: Number of checkpoints to keep, with this one; of the others, the ones with a
            true `TIMED` in their *meta* are deleted first, then the oldest.  None to keep this one,
            the one before, and all older ones without `TIMED`.  The best one is kept besides: the
            last that has a true `BEST_KEY` in its *meta*.
        keep_every: Checkpoints of multiples of this are kept besides; None for none.
        damaged: Checkpoints that are known to be damaged: they neither count as kept nor are
            deleted.
        plan: Write plan of this rank; None: it writes everything.
        channel: Channel of the ranks of *plan*, which all must call this; None if there is one.
        failure: Error for which this rank cannot write its part; None if it can.

    Raises:
        Exception: *failure*; the other ranks learn of it, and nothing is saved.
        CheckpointError: The disk is full or refuses; earlier checkpoints are unchanged.
        OtherRankError: The same for another process, with its text.
        RunError: Another process has ended.
        ValueError, TypeError: An argument is not plain tensors or JSON (a bug).
    """
    _check_arguments(iteration, keep_last)
    _check_tensors(tensors)
    if plan is None:
        plan = WritePlanner().plan(tensors, {})
        tensors = plan.views(tensors)
    channel = channel or Channel(None)
    manifest = _describe(iteration, plan.tensors, meta, model_shape)
    save = _Save(checkpoints_dir, manifest, plan, keep_last, keep_every, damaged)

    def write(directory: Path) -> Written:
        from lmcore.checkpoint.dcp_writer import write_chunks

        if failure is not None:
            raise failure
        return write_chunks(
            directory,
            [tensors[key] for key in plan.own],
            rank=channel.rank,
            num_threads=_num_threads(sum(one.nbytes for one in tensors.values()), _MAX_THREADS),
        )

    saved = _save(save, write, channel)
    if channel.rank == 0:
        logger.info("saved %s", saved)
    return saved


def save_streamed(
    checkpoints_dir: Path,
    iteration: int,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], torch.Tensor],
    meta: Mapping[str, JSON],
    *,
    model_shape: Mapping[str, ShapeValue],
) -> Path:
    """Save tensors that are read one at a time as `iter_XXXXXXX` and return that path.

    Two tensors at a time are in memory.  The other checkpoints in the directory are kept.

    Args:
        checkpoints_dir: Directory of the checkpoints, created if absent.
        iteration: Number of steps done; see `save_checkpoint`.
        entries: Dtype and shape of each tensor, by name; they are read in this order.
        read: Returns the whole tensor with a name, on any device.
        meta: JSON values; see `save_checkpoint`.
        model_shape: Shape of the model; see `save_checkpoint`.

    Raises:
        CheckpointError: The disk is full or refuses, or *read* failed; nothing was saved.
        ValueError, TypeError: A tensor is not as its entry says, or *meta* is not JSON (a bug).
    """
    import torch

    from lmcore.checkpoint.dcp_metadata import dtype_of

    _check_arguments(iteration, None)
    plan = WritePlanner().plan(
        {
            name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
            for name, entry in entries.items()
        },
        {},
    )
    manifest = _describe(iteration, plan.tensors, meta, model_shape)
    save = _Save(checkpoints_dir, manifest, plan, None, None, ())

    def write(directory: Path) -> Written:
        from lmcore.checkpoint.dcp_writer import write_streamed

        threads = _num_threads(sum(map(num_bytes, entries.values())), _STREAMS)
        return write_streamed(
            directory, plan.own, entries, read, checksums=False, num_threads=threads
        )

    return _save(save, write, Channel(None))


def _save(save: _Save, write: Callable[[Path], Written], channel: Channel) -> Path:
    """Save the chunks that *write* writes into a directory; all ranks must call this."""
    checkpoints_dir, iteration = save.directory, save.manifest.iteration
    encode_manifest(save.manifest)  # fails here if it is not JSON, before anything is written
    about = f"the checkpoint of iteration {iteration}"
    temporary = channel.exchange(
        lambda: None,
        lambda parts: [save.prepare().name] * len(parts),
        about,
        undo=save.remove,
    )
    target = channel.exchange(
        lambda: save.write(_inside(checkpoints_dir, temporary), write, channel.rank),
        lambda parts: [save.finish(parts).name] * len(parts),
        about,
        undo=save.remove,
    )
    return _inside(checkpoints_dir, target)


def _inside(directory: Path, name: str) -> Path:
    """Return the path of *name*, which another rank sent, in *directory*.

    Raises:
        RunError: It would lead elsewhere.
    """
    if not name or Path(name).name != name or name == "..":
        raise RunError(
            f"another rank sent `{name}` as the name of a checkpoint's directory",
            why=f"it is no name in `{directory}`",
            hint="check that all ranks run the same version of lmcore",
        )
    return directory / name


class _Save:
    """One save; rank 0 does everything except `write`."""

    def __init__(
        self,
        checkpoints_dir: Path,
        manifest: Manifest,
        plan: WritePlan,
        keep_last: int | None,
        keep_every: int | None,
        damaged: Collection[Path],
    ) -> None:
        self.directory, self.manifest, self.plan = checkpoints_dir, manifest, plan
        self.keep_last, self.keep_every = keep_last, keep_every
        self.damaged = {path.resolve() for path in damaged}
        self.needed = _needed_bytes(plan.tensors)
        self.target = iteration_path(checkpoints_dir, manifest.iteration)
        self.temporary: Path | None = None
        self.sequence = 1
        self.obsolete: list[Path] = []

    def prepare(self) -> Path:
        """Make room and return the new hidden directory."""
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            _clean_up(self.directory)
            earlier = complete_checkpoints(self.directory)
            self.sequence += max((manifest.sequence for _path, manifest in earlier), default=0)
            self.obsolete = self._find_obsolete(earlier)
            self._make_space(earlier)
            self.temporary = hidden_path(self.target)
            self.temporary.mkdir()
        return self.temporary

    def write(self, temporary: Path, write: Callable[[Path], Written], rank: int) -> dict[str, Any]:
        """Write this rank's chunks; return files and byte ranges as JSON."""
        if not temporary.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see `{temporary}`, which rank 0 has made",
                hint="choose a directory with `--save` that all hosts of the run share",
            )
        with self._explained():
            written = write(temporary)
        return {
            "files": {name: [entry.size, entry.crc32] for name, entry in written.files.items()},
            "ranges": [[one.file, one.offset, one.length] for one in written.ranges],
        }

    def finish(self, parts: list[dict[str, Any]]) -> Path:
        """Write index and manifest, publish, and delete older checkpoints."""
        assert self.temporary is not None, "prepare was called"
        with self._explained():
            target = self._publish(self.temporary, parts)
        _note_latest(self.directory, self.manifest.iteration)
        if self.obsolete or self.keep_last is not None:
            _delete(self.directory, self.obsolete)
        return target

    def _find_obsolete(self, earlier: Sequence[tuple[Path, Manifest]]) -> list[Path]:
        """Return the checkpoints that are deleted after this save, the most recent one first."""
        others = [
            (path, manifest)
            for path, manifest in earlier
            if path != self.target
            and parse_iteration(path.name) is not None
            and path.resolve() not in self.damaged
        ]
        if self.keep_last is None:
            obsolete = [item for item in others[1:] if item[1].meta.get(TIMED)]
        else:
            others.sort(key=lambda item: bool(item[1].meta.get(TIMED)))  # newest first of each kind
            obsolete = others[self.keep_last - 1 :]
        best = None if self.manifest.meta.get(BEST_KEY) else best_of(earlier)
        return [
            path
            for path, manifest in obsolete
            if path != best and (not self.keep_every or manifest.iteration % self.keep_every)
        ]

    def _make_space(self, earlier: Sequence[tuple[Path, Manifest]]) -> None:
        """Delete obsolete checkpoints already before this save if it does not fit otherwise.

        The newest checkpoint stays until this one is complete.
        """
        intact = (path for path, _manifest in earlier if path.resolve() not in self.damaged)
        newest = next(intact, None)
        for path in self.obsolete[::-1]:
            if path != newest and shutil.disk_usage(self.directory).free < self.needed:
                logger.warning("deleted %s before this save: the disk has no room for both", path)
                _delete(self.directory, [path])
                self.obsolete.remove(path)
        if shutil.disk_usage(self.directory).free < self.needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _publish(self, temporary: Path, parts: list[dict[str, Any]]) -> Path:
        from lmcore.checkpoint.dcp_index import write_index
        from lmcore.checkpoint.dcp_metadata import METADATA_NAME
        from lmcore.checkpoint.dcp_writer import ByteRange

        stored = [
            (name, chunk, ByteRange(*byte_range))
            for chunks, part in zip(self.plan.chunks, parts, strict=True)
            for (name, chunk), byte_range in zip(chunks, part["ranges"], strict=True)
        ]
        files = {name: FileEntry(*entry) for part in parts for name, entry in part["files"].items()}
        files[METADATA_NAME] = write_index(temporary, self.manifest.tensors, stored)
        complete = replace(self.manifest, sequence=self.sequence, files=dict(sorted(files.items())))
        write_durably(temporary / MANIFEST_NAME, encode_manifest(complete))
        sync_directory(temporary)
        return _publish(self.directory, self.manifest.iteration, temporary)

    def remove(self) -> None:
        """Remove the directory of a save that failed."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failed_save(
                self.directory, self.manifest.iteration, self.needed, error
            ) from error


def _check_arguments(iteration: int, keep_last: int | None) -> None:
    if iteration < 0:
        raise ValueError(f"iteration {iteration} is negative")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last {keep_last} would delete the checkpoint just saved")


def _check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

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
    if target.exists() or target.is_symlink():
        reason = _keep_reason(target)
        if reason is not None:
            _move_aside(target, reason)
    publish_directory(temporary, target, replace=True)  # see layout for its hidden names
    return target


def _move_aside(target: Path, reason: str) -> None:
    """Rename what has the name of a new checkpoint, with a warning that gives the *reason*."""
    aside = next(
        path
        for number in range(1, 1_000_000)
        if not (path := target.with_name(f"{target.name}.aside-{number}")).exists()
    )
    logger.warning(
        "%s; `%s` is now `%s`, as a new checkpoint needs its name", reason, target.name, aside.name
    )
    target.rename(aside)


def _keep_reason(path: Path) -> str | None:
    """Return why *path* must not be replaced by a new checkpoint; None for a checkpoint."""
    if path.is_symlink():
        return f"`{path}` is a link"
    if not path.is_dir():
        return f"`{path}` is a file, not a checkpoint"
    try:
        read_manifest(path)
    except CheckpointError as error:
        return error.what
    return None


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
        _remove(hidden.path)
    for note in abandoned_notes(checkpoints_dir):
        note.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a directory, or a link to one, whose target stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _note_latest(checkpoints_dir: Path, iteration: int) -> None:
    try:
        write_atomically(checkpoints_dir / LATEST_NAME, f"{iteration}\n".encode())
    except OSError as error:
        # For users and scripts only; the checkpoint itself is safe.
        logger.warning("could not update %s: %s", LATEST_NAME, error)


def _delete(checkpoints_dir: Path, checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        hidden = hidden_path(path, "deleted")
        try:
            path.rename(hidden)
            if hidden.is_symlink():
                hidden.unlink()
            else:
                shutil.rmtree(hidden)
        except OSError as error:
            # The new checkpoint is safe; the next save tries again.
            logger.warning("could not delete the older checkpoint %s: %s", path, error)
    sync_directory(checkpoints_dir)


def _num_threads(size: int, at_most: int) -> int:
    return max(1, min(num_io_threads(at_most), size // _BYTES_PER_THREAD))


def _needed_bytes(tensors: Mapping[str, TensorEntry]) -> int:
    own = sum(num_bytes(entry) for entry in tensors.values())
    return own + _OVERHEAD_PER_TENSOR * len(tensors) + _OVERHEAD
