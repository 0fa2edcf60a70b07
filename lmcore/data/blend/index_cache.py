"""On-disk cache of large blend indices, so that the processes of a host map one copy."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.base.log import warn_once
from lmcore.data.blend.index import BlendIndex, build_blend_index
from lmcore.data.cache.array_store import Arrays, load_arrays, store_arrays
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.cache.progress import log_progress, report_progress
from lmcore.data.indexed.files import disk_errors

__all__ = ["blend_index"]

_log = logging.getLogger(__name__)

_SMALL = 1 << 20
"""Size below which building an index is faster than loading its files."""
_FORMAT = 1


def blend_index(
    weights: Sequence[float], size: int, directory: Path, name: str, *, verify: bool = False
) -> BlendIndex:
    """Return the index of a blend (see `build_blend_index`), a large one from the cache.

    Args:
        weights: Normalized weight of each source.
        size: Number of samples in the blend.
        directory: Directory of the cache.  If it is not writable, the index is built in memory,
            with a warning.
        name: First part of the file names, such as `train`.
        verify: True to verify every block of a cached index.
    """
    if size < _SMALL:
        return build_blend_index(weights, size)
    key = json.dumps([_FORMAT, list(weights), size]).encode()
    stem = directory / f"{name}-blend-{hashlib.blake2b(key, digest_size=16).hexdigest()}"
    found = load_arrays(stem, every_block=verify)
    if found is not None:
        return _index(found)
    # The random sample of the next load could miss the damage that this load found.
    every_block = verify or Path(f"{stem}.json").exists()
    what = f"the blend of {name}"

    def build() -> BlendIndex:
        with report_progress(what, 0, log_progress):
            return build_blend_index(weights, size)

    def store() -> None:
        source, sample = build()
        store_arrays(stem, {"source": source, "sample": sample})

    try:
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        found = build_or_wait(
            Path(f"{stem}.lock"),
            lambda: load_arrays(stem, every_block=every_block),
            store,
            what=what,
        )
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        warn_once(_log, "%s: %s is kept in memory", error.what, what)
        return build()
    return _index(found)


def _index(arrays: Arrays) -> BlendIndex:
    return arrays["source"].view("int16"), arrays["sample"].view("int64")
