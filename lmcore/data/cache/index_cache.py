"""On-disk cache of sample indices: built by one process, memory-mapped by all.

The key is a hash of everything that determines an index (sizes of the sequences, lengths, counts,
seed), so an entry is found again after the data moved, and never after the data changed.  Opening
an entry takes a few milliseconds whatever its size: the arrays are memory-mapped (`array_store`),
and the hash of the sizes is recorded (`statistics`).  `build_lock` elects the process that builds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lmcore.base.errors import DataError
from lmcore.base.log import warn_once
from lmcore.data.cache.array_store import Arrays, load_arrays, store_arrays
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.cache.progress import ProgressCallback, log_progress, report_progress
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import disk_errors
from lmcore.data.indexed.statistics import (
    SequenceStatistics,
    record_statistics,
    sequence_statistics,
)
from lmcore.data.native import Counter

__all__ = [
    "ArraysRequest",
    "cache_key",
    "index_cache_dir",
    "load_or_build",
]

_log = logging.getLogger(__name__)

_FORMAT = 2
_ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class ArraysRequest(Protocol):
    """Arrays that are determined by the sizes of a dataset's sequences and a few settings."""

    @property
    def kind(self) -> str:
        """Name of the arrays in messages, such as `sample index`."""

    @property
    def sequence_range(self) -> tuple[int, int]:
        """First sequence that determines the arrays, and the one after the last."""

    def settings(self) -> Mapping[str, object]:
        """Return everything else that determines the arrays, as JSON can write it."""

    def work(self, statistics: SequenceStatistics) -> int:
        """Return the units of work that `build` counts; 0 if unknown."""

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build the arrays, and count finished units of work in *progress*."""


def cache_key(request: ArraysRequest, statistics: SequenceStatistics) -> str:
    """Return the hash that identifies a request's cache entry: 32 hexadecimal digits."""
    described = [_FORMAT, request.kind, dict(request.settings()), statistics.digest]
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def index_cache_dir(indexed: IndexedDataset, cache_dir: str | Path | None) -> Path:
    """Return the directory of a dataset's indices.

    Args:
        indexed: The dataset.
        cache_dir: `--data-cache-path`; None for a directory beside the data.
    """
    return Path(f"{indexed.prefix}_index_cache" if cache_dir is None else cache_dir)


def load_or_build(
    indexed: IndexedDataset,
    request: ArraysRequest,
    *,
    cache_dir: str | Path | None,
    name: str,
    report: ProgressCallback = log_progress,
    statistics: SequenceStatistics | None = None,
) -> Arrays:
    """Return arrays from the cache; build and cache them if they are missing.

    Every process of a run may call this with the same arguments.  Among processes with a common
    directory one builds, and the other processes wait for its files.  No collective is used.

    Args:
        indexed: The dataset.
        request: Description of the arrays.
        cache_dir: `--data-cache-path`; None for a directory beside the data.  If arrays are
            missing in a read-only directory, they are built in memory, with a warning.
        name: First part of the file names, such as `train`.
        report: Function that gets the progress of the build, once a second.
        statistics: Statistics of the request's sequences, if known.

    Raises:
        DataError: *cache_dir* is given and is not a directory, or its disk is full.
    """
    directory = index_cache_dir(indexed, cache_dir)
    known = statistics or sequence_statistics(indexed, request.sequence_range, record_dir=directory)
    stem = directory / f"{name}-{cache_key(request, known)}"
    cached = load_arrays(stem, every_block=indexed.verify_indices)
    if cached is not None:
        return cached
    # The random sample of the next load could miss the damage that this load found.
    every_block = indexed.verify_indices or Path(f"{stem}.json").exists()
    what = f"the {request.kind} of {name}"

    def make() -> Arrays:
        with (
            indexed.reading("the sizes of the sequences"),
            report_progress(what, request.work(known), report) as progress,
        ):
            return request.build(indexed, progress)

    try:
        with disk_errors(directory):
            if cache_dir is None:
                _require_writable(directory.parent)
            directory.mkdir(parents=True, exist_ok=True)
            _require_writable(directory)
    except DataError as error:
        cause = error.__cause__
        read_only = isinstance(cause, OSError) and cause.errno in _READ_ONLY
        if cache_dir is not None and not read_only:
            raise
        hint = " (see `--data-cache-path`)" if cache_dir is None else ""
        warn_once(_log, "%s: the %s is kept in memory%s", error.what, request.kind, hint)
        return make()
    record_statistics(indexed, request.sequence_range, known, directory)
    return build_or_wait(
        Path(f"{stem}.lock"),
        lambda: load_arrays(stem, every_block=every_block),
        lambda: store_arrays(stem, make()),
        what=what,
    )


def _require_writable(directory: Path) -> None:
    """Raise `PermissionError` for a directory whose mode is read-only, even if root may write."""
    may_write = os.access(directory, os.W_OK | os.X_OK)
    if not may_write or not directory.stat().st_mode & _ANY_WRITE:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
