"""Keeps GPT indices on disk: built once by one process, mapped to memory by all.

The key is a hash of everything the index follows from (sizes of the documents, lengths, counts,
seed), so that a cache is found again after the data moved, and never after it changed.  A cache
is three `.npy` files and a `.json` that describes them; the `.json` comes last and makes it
complete.  Whatever does not fit its description is built anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcore.data.gpt_index import FINAL_EPOCH_THRESHOLD, GPTIndex, build_gpt_index
from lmcore.data.indexed import IndexedDataset
from lmcore.data.indexed_writer import disk_errors, replace_file
from lmcore.errors import DataError
from lmcore.log import warn_once

__all__ = ["IndexRequest", "default_cache_dir", "load_or_build"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_ARRAYS = ("document_index", "sample_index", "shuffle_index")
_CHUNK = 1 << 24
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class IndexRequest:
    """What an index follows from, beside the sizes of the documents."""

    sequence_range: tuple[int, int]
    num_samples: int
    sequence_length: int
    seed: int
    final_epoch_threshold: float = FINAL_EPOCH_THRESHOLD

    def build(self, indexed: IndexedDataset) -> GPTIndex:
        """Build the index."""
        return build_gpt_index(
            indexed.sizes,
            self.sequence_range,
            sequence_length=self.sequence_length,
            num_samples=self.num_samples,
            seed=self.seed,
            final_epoch_threshold=self.final_epoch_threshold,
        )

    def key(self, indexed: IndexedDataset) -> str:
        """Return the hash that names the cache."""
        start, end = self.sequence_range
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([_FORMAT, asdict(self)], sort_keys=True).encode())
        for at in range(start, end, _CHUNK):
            digest.update(np.ascontiguousarray(indexed.sizes[at : min(at + _CHUNK, end)]).data)
        return digest.hexdigest()


def default_cache_dir(indexed: IndexedDataset) -> Path:
    """Return where indices go without `--data-cache-path`: beside the data."""
    return Path(f"{indexed.prefix}_index_cache")


def load_or_build(
    indexed: IndexedDataset,
    request: IndexRequest,
    *,
    cache_dir: str | Path | None,
    name: str,
    build: bool = True,
    timeout: float = 3600.0,
) -> GPTIndex:
    """Return the index from the cache; build it and cache it if it is not there.

    Args:
        indexed: The dataset.
        request: What to build.
        cache_dir: `--data-cache-path`; None for a directory beside the data, and where that
            cannot be written for memory alone, with a warning.
        name: First part of the files' names, for people.
        build: Whether this process may build; one that may not waits for one that does.
        timeout: Seconds to wait for another process.

    Raises:
        DataError: *cache_dir* is given and cannot be written, or another process did not finish.
    """
    directory = Path(cache_dir) if cache_dir is not None else default_cache_dir(indexed)
    stem = directory / f"{name}-{request.key(indexed)}"
    cached = _load(stem)
    if cached is not None:
        return cached
    try:
        with disk_errors(directory):
            if cache_dir is None:
                _require_writable(directory.parent)
            directory.mkdir(parents=True, exist_ok=True)
            _require_writable(directory)
    except DataError as error:
        if cache_dir is not None:
            raise
        warn_once(
            _log, "%s: the sample index is kept in memory (see `--data-cache-path`)", error.what
        )
        return request.build(indexed)
    return _wait_or_build(stem, lambda: request.build(indexed), build=build, timeout=timeout)


def _require_writable(directory: Path) -> None:
    """Raise `PermissionError` for a directory that is read-only by its mode, even to root."""
    may_write = os.access(directory, os.W_OK | os.X_OK)
    if not may_write or not directory.stat().st_mode & _ANY_WRITE:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _wait_or_build(
    stem: Path, make: Callable[[], GPTIndex], *, build: bool, timeout: float
) -> GPTIndex:
    lock = Path(f"{stem}.lock")
    deadline = time.monotonic() + timeout
    while True:
        if build:
            with _locked(lock) as mine:
                if mine and _load(stem) is None:
                    _store(stem, make())
        cached = _load(stem)
        if cached is not None:
            return cached
        if time.monotonic() > deadline:
            raise DataError(
                f"no sample index after {timeout:.0f} s of waiting",
                why=f"another process was to build `{stem}.json`",
                hint=f"see whether that process lives; if it does not, remove `{lock}`",
            )
        time.sleep(_POLL_SECONDS)


@contextmanager
def _locked(lock: Path) -> Iterator[bool]:
    """Hold *lock* if it is free; yield whether it is held.

    The lock only saves work: files appear whole and are equal whoever builds them, so that two
    builders at once do no harm.
    """
    owner = f"{socket.gethostname()} {os.getpid()}"
    try:
        with disk_errors(lock):
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except DataError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        _remove_if_dead(lock)
        yield False
        return
    try:
        os.write(handle, owner.encode())
        os.close(handle)
        yield True
    finally:
        lock.unlink(missing_ok=True)


def _remove_if_dead(lock: Path) -> None:
    """Remove a lock whose owner ran on this machine and is gone."""
    try:
        host, _, pid = lock.read_text().partition(" ")
    except OSError:
        return
    if host != socket.gethostname() or not pid.isdigit():
        return
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        _log.warning("`%s`: the process %s that built this index is gone; starting over", lock, pid)
        lock.unlink(missing_ok=True)
    except PermissionError:
        return


def _store(stem: Path, index: GPTIndex) -> None:
    described = {}
    ending = f".{os.getpid()}.tmp"
    temporaries = []
    try:
        for array in _ARRAYS:
            target = Path(f"{stem}-{array}.npy")
            temporaries.append(Path(f"{target}{ending}"))
            with disk_errors(target):
                _write(temporaries[-1], getattr(index, array))
                described[array] = {"file": target.name, **_facts(temporaries[-1])}
                replace_file(temporaries[-1], target)
        target = Path(f"{stem}.json")
        temporaries.append(Path(f"{target}{ending}"))
        with disk_errors(target):
            text = json.dumps({"arrays": described}, indent=1)
            temporaries[-1].write_text(text + "\n")
            replace_file(temporaries[-1], target)
    finally:
        for path in temporaries:
            path.unlink(missing_ok=True)


def _write(path: Path, values: npt.NDArray[np.integer]) -> None:
    with path.open("wb") as file:
        np.save(file, values, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _load(stem: Path) -> GPTIndex | None:
    """Return the cached index, or None where there is none or it does not fit its description."""
    try:
        described = json.loads(Path(f"{stem}.json").read_text())["arrays"]
        documents, samples, shuffle = (
            _load_array(stem.parent, described[array]) for array in _ARRAYS
        )
        return GPTIndex(documents.view(np.int32), samples.view(np.int32), shuffle)
    except FileNotFoundError as error:
        if Path(f"{stem}.json").exists():
            warn_once(
                _log, "`%s.json`: `%s` is gone; building the index anew", stem, error.filename
            )
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        warn_once(_log, "the cached index `%s.json` is damaged (%s); building it anew", stem, error)
        return None


def _load_array(directory: Path, described: dict[str, object]) -> npt.NDArray[np.integer]:
    path = directory / str(described["file"])
    facts = _facts(path)
    if any(described.get(fact) != value for fact, value in facts.items()):
        raise ValueError(f"`{path.name}` has {facts}")
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(values)


def _facts(path: Path) -> dict[str, int]:
    """Return size and CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}
