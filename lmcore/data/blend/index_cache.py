"""Keeps the index of a large blend on disk, so that a host's processes map one copy of it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from lmcore.data.blend.index import BlendIndex, build_blend_index
from lmcore.data.cache.array_store import Arrays, load_arrays, store_arrays
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.cache.progress import log_progress, report_progress
from lmcore.data.indexed.files import disk_errors
from lmcore.errors import DataError
from lmcore.log import warn_once

__all__ = ["blend_index"]

_log = logging.getLogger(__name__)

_SMALL = 1 << 20
"""Samples of a blend that is built faster than its files are found."""
_FORMAT = 1


def blend_index(weights: Sequence[float], size: int, directory: Path, name: str) -> BlendIndex:
    """Return the index of a blend; that of a large one from the cache, where it is built once.

    Args:
        weights: Of each source, normalized.
        size: Samples of the blend.
        directory: Of the cache.  Where it cannot be written the index is built in memory, with a
            warning.
        name: First part of the files' names, for people.
    """
    if size < _SMALL:
        return build_blend_index(weights, size)
    key = json.dumps([_FORMAT, list(weights), size]).encode()
    stem = directory / f"{name}-blend-{hashlib.blake2b(key, digest_size=16).hexdigest()}"
    found = load_arrays(stem)
    if found is not None:
        return _index(found)
    what = f"the blend of {name}"

    def make() -> BlendIndex:
        with report_progress(what, 0, log_progress):
            return build_blend_index(weights, size)

    def store() -> None:
        source, sample = make()
        store_arrays(stem, {"source": source, "sample": sample})

    try:
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        found = build_or_wait(
            Path(f"{stem}.lock"),
            lambda: load_arrays(stem),
            store,
            what=what,
        )
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        warn_once(_log, "%s: %s is kept in memory", error.what, what)
        return make()
    return _index(found)


def _index(arrays: Arrays) -> BlendIndex:
    return arrays["source"].view("int16"), arrays["sample"].view("int64")
