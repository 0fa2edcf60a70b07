"""Keeps indices on disk: built once by one process, mapped to memory by all.

The key is a hash of everything an index follows from (sizes of the documents, lengths, counts,
seed), so that a cache is found again after the data moved, and never after it changed.  Opening
one that is there takes the same few milliseconds whatever its size: the arrays are mapped
(`array_files`), and the hash of the sizes is on record (`sequence_facts`).  Who builds, and how the
others wait, stands in `build_lock`.
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

from lmcore.data.cache.array_store import Arrays, load_arrays, store_arrays
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.cache.progress import ProgressCallback, log_progress, reported
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import disk_errors
from lmcore.data.indexed.statistics import SequenceFacts, record_facts, sequence_facts
from lmcore.data.native import Counter
from lmcore.errors import DataError
from lmcore.log import warn_once

__all__ = [
    "ArraysRequest",
    "cache_key",
    "default_cache_dir",
    "load_or_build",
]

_log = logging.getLogger(__name__)

_FORMAT = 2
_ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class ArraysRequest(Protocol):
    """Some arrays that follow from the sizes of a dataset's sequences and a few settings."""

    @property
    def kind(self) -> str:
        """What they are, such as `sample index`."""

    @property
    def sequence_range(self) -> tuple[int, int]:
        """First sequence that they are about, and the one after the last."""

    def settings(self) -> Mapping[str, object]:
        """Return everything else that they follow from, as JSON can write it."""

    def work(self, facts: SequenceFacts) -> int:
        """Return the units of work that `build` counts; 0 if that is not known."""

    def build(self, indexed: IndexedDataset, progress: Counter) -> Arrays:
        """Build them."""


def cache_key(request: ArraysRequest, facts: SequenceFacts) -> str:
    """Return the hash that names the cache of a request."""
    described = [_FORMAT, request.kind, dict(request.settings()), facts.digest]
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def default_cache_dir(indexed: IndexedDataset) -> Path:
    """Return where indices go without `--data-cache-path`: beside the data."""
    return Path(f"{indexed.prefix}_index_cache")


def load_or_build(
    indexed: IndexedDataset,
    request: ArraysRequest,
    *,
    cache_dir: str | Path | None,
    name: str,
    report: ProgressCallback = log_progress,
    facts: SequenceFacts | None = None,
) -> Arrays:
    """Return arrays from the cache; build and cache them if they are not there.

    Every process of a run may call this with the same arguments.  Of those that see one directory
    one builds, and the others wait for its files: all processes where the disk is shared, those of
    each host where it is not.  No collective is used.

    Args:
        indexed: The dataset.
        request: What to build.
        cache_dir: `--data-cache-path`; None for a directory beside the data.  What is not there,
            and must not be written there, is built in memory, with a warning.
        name: First part of the files' names, for people.
        report: Told once a second how far the build is, if it takes that long.
        facts: Of the request's sequences, if they are known.

    Raises:
        DataError: *cache_dir* is given and is no directory, or its disk is full.
    """
    directory = Path(cache_dir) if cache_dir is not None else default_cache_dir(indexed)
    known = facts or sequence_facts(indexed, request.sequence_range, record_dir=directory)
    stem = directory / f"{name}-{cache_key(request, known)}"
    cached = load_arrays(stem)
    if cached is not None:
        return cached
    what = f"the {request.kind} of {name}"

    def make() -> Arrays:
        with reported(what, request.work(known), report) as progress:
            return request.build(indexed, progress)

    try:
        with disk_errors(directory):
            if cache_dir is None:
                _require_writable(directory.parent)
            directory.mkdir(parents=True, exist_ok=True)
            _require_writable(directory)
    except DataError as error:
        if cache_dir is not None and not _is_read_only(error):
            raise
        hint = " (see `--data-cache-path`)" if cache_dir is None else ""
        warn_once(_log, "%s: the %s is kept in memory%s", error.what, request.kind, hint)
        return make()
    record_facts(indexed, request.sequence_range, known, directory)
    return build_or_wait(
        Path(f"{stem}.lock"),
        lambda: load_arrays(stem),
        lambda: store_arrays(stem, make()),
        what=what,
    )


def _is_read_only(error: DataError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in {errno.EACCES, errno.EPERM, errno.EROFS}


def _require_writable(directory: Path) -> None:
    """Raise `PermissionError` for a directory that is read-only by its mode, even to root."""
    may_write = os.access(directory, os.W_OK | os.X_OK)
    if not may_write or not directory.stat().st_mode & _ANY_WRITE:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
