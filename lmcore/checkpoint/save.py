"""Saves a checkpoint so that it is complete or absent, whatever happens on the way.

Everything is written and synced under a hidden name and appears with one rename; older
checkpoints are deleted only afterwards, and only under a hidden name too.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata as distribution
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.checkpoint.durable_file import (
    num_io_threads,
    sync_directory,
    write_atomically,
    write_durably,
)
from lmcore.checkpoint.layout import (
    LATEST_NAME,
    complete_checkpoints,
    hidden_directories,
    hidden_path,
    iteration_path,
    parse_iteration,
)
from lmcore.checkpoint.manifest import (
    FORMAT_VERSION,
    JSON,
    MANIFEST_NAME,
    Manifest,
    ShapeValue,
    TensorEntry,
    encode_manifest,
    read_manifest,
)
from lmcore.errors import CheckpointError

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
) -> Path:
    """Save *tensors* and *meta* as `iter_XXXXXXX` in *checkpoints_dir* and return that path.

    Args:
        checkpoints_dir: Made if absent.  One process at a time saves into it.
        iteration: Steps done.  A checkpoint of the same iteration is replaced, because a run that
            went back to an older one comes past it again and must not stop there.
        tensors: By distinct names, on any device; shared storage is written once per name given.
        meta: JSON values (counters, schedule, data position), returned by `read_manifest`.
        model_shape: What `check_shape` compares before a load.
        keep_last: How many checkpoints stay, this one included; older ones are deleted.

    Raises:
        CheckpointError: the disk is full or refuses; earlier checkpoints are as they were.
        ValueError, TypeError: what was passed is not plain tensors and JSON (a bug).
    """
    _check_arguments(iteration, tensors, keep_last)
    manifest = _describe(iteration, tensors, meta, model_shape)
    encode_manifest(manifest)  # what is not JSON fails here, before anything is written
    needed = _needed_bytes(tensors)
    try:
        checkpoints_dir.mkdir(parents=True, exist_ok=True)
        _clean_up(checkpoints_dir)
        _check_space(checkpoints_dir, needed)
        earlier = complete_checkpoints(checkpoints_dir)
        sequence = 1 + max((other.sequence for _path, other in earlier), default=0)
        target = _write(checkpoints_dir, manifest, sequence, tensors)
    except OSError as error:
        raise _failed(checkpoints_dir, iteration, needed, error) from error
    _note_latest(checkpoints_dir, iteration)
    if keep_last is not None:
        older = [
            path
            for path, _manifest in earlier
            if path != target and parse_iteration(path.name) is not None
        ]
        _delete(checkpoints_dir, older[keep_last - 1 :])
    logger.info("saved %s", target)
    return target


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
    tensors: Mapping[str, torch.Tensor],
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
        tensors={
            name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in sorted(tensors.items())
        },
        files={},
    )


def _write(
    checkpoints_dir: Path, manifest: Manifest, sequence: int, tensors: Mapping[str, torch.Tensor]
) -> Path:
    from lmcore.checkpoint.dcp_writer import write_tensors

    temporary = hidden_path(checkpoints_dir, manifest.iteration, "tmp")
    try:
        temporary.mkdir()
        files = write_tensors(temporary, tensors, _num_threads(tensors))
        complete = replace(manifest, sequence=sequence, files=files)
        write_durably(temporary / MANIFEST_NAME, encode_manifest(complete))
        sync_directory(temporary)
        return _publish(checkpoints_dir, manifest.iteration, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(checkpoints_dir: Path, iteration: int, temporary: Path) -> Path:
    target = iteration_path(checkpoints_dir, iteration)
    if target.exists() or target.is_symlink():
        _make_room(checkpoints_dir, iteration, target)
    temporary.rename(target)
    sync_directory(checkpoints_dir)
    shutil.rmtree(hidden_path(checkpoints_dir, iteration, "replaced"), ignore_errors=True)
    return target


def _make_room(checkpoints_dir: Path, iteration: int, target: Path) -> None:
    if _is_ours(target):
        # Until the next rename the old one is found under this name (see layout).
        target.rename(hidden_path(checkpoints_dir, iteration, "replaced"))
        return
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
        hidden = path.with_name(f".{path.name}.deleted-{os.getpid()}")
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


def _needed_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    own = sum(tensor.nbytes for tensor in tensors.values())
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
