"""Sets of arrays in `.npy` files that are complete or absent, and memory-mapped when loaded.

`STEM-NAME.npy` holds an array.  `STEM.json` lists the files with size and CRC-32; it is written
last and makes the set complete.  Computing a checksum takes as long as reading the file, so each
file gets a modification time in the past, which `STEM.json` records: while a file has this time,
nothing has written to it since; otherwise, as after a copy, the checksum decides.  Bits that
change on the disk leave the time as it is: each load also verifies a few blocks, first, last and
random ones, and so all of a small file; `--verify-data` verifies all.  The list has its own
checksum.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.crc32 import crc32
from lmcore.base.durable import AtomicFile, sync_file, write_atomically
from lmcore.base.errors import DataError
from lmcore.base.log import warn_once
from lmcore.data.indexed.files import disk_errors

__all__ = ["Arrays", "load_arrays", "store_arrays"]

_log = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[np.integer]]

_MAX_BYTES = 1 << 26
_CHUNK = 1 << 24
_BLOCK = 1 << 20
_SAMPLED = 4  # blocks of each file that a load verifies
_BACKDATED_NS = 10 * 10**9  # more than the resolution of any file system's times


def store_arrays(stem: Path, arrays: Mapping[str, npt.NDArray[np.integer]]) -> None:
    """Write *arrays* so that `load_arrays` finds all of them or none.

    Args:
        stem: Path of the files without `-NAME.npy`.
        arrays: The arrays by name.

    Raises:
        DataError: A file cannot be written; nothing incomplete is left.
    """
    described = {}
    for name, values in arrays.items():
        target = Path(f"{stem}-{name}.npy")
        with disk_errors(target), AtomicFile(target) as file:
            described[name] = {"file": target.name, **_write(file, values)}
    target = Path(f"{stem}.json")
    with disk_errors(target):
        document = {"arrays": described, "arrays_crc32": _description_checksum(described)}
        write_atomically(target, f"{json.dumps(document, indent=1)}\n".encode())


def load_arrays(stem: Path, *, every_block: bool = False) -> Arrays | None:
    """Memory-map the arrays, read-only; return None if the set is missing or damaged.

    Args:
        stem: Path that was given to `store_arrays`.  A damaged set is reported in a warning.
        every_block: True to verify every block of each file.
    """
    description = Path(f"{stem}.json")
    try:
        described = _described(description)
        return {
            name: _load(stem.parent, file, every_block=every_block)
            for name, file in described.items()
        }
    except FileNotFoundError as error:
        if description.exists():
            warn_once(
                _log, "`%s`: `%s` is missing; rebuilding the index", description, error.filename
            )
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        RecursionError,
    ) as error:
        if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
            raise DataError(
                f"cannot open the cached index `{description}`",
                why=error.strerror,
                hint="raise the limit on open files (`ulimit -n`)",
            ) from None
        warn_once(_log, "the cached index `%s` is damaged (%s); rebuilding it", description, error)
        return None


def _write(file: BinaryIO, values: npt.NDArray[np.integer]) -> dict[str, Any]:
    path = Path(file.name)
    np.save(file, values, allow_pickle=False)
    sync_file(file)
    checksum = _checksum(path)
    blocks = [_block_checksum(path, i) for i in range(-(-path.stat().st_size // _BLOCK))]
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - _BACKDATED_NS))
    written = path.stat()
    return {
        "bytes": written.st_size,
        "crc32": checksum,
        "blocks_crc32": blocks,
        "mtime_ns": written.st_mtime_ns,
    }


def _described(description: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_bounded_file(description, _MAX_BYTES))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    described: dict[str, Any] = document["arrays"]
    expected = document.get("arrays_crc32")  # absent in the files of older versions
    if expected is not None and expected != _description_checksum(described):
        raise ValueError(f"`{description.name}` has another checksum")
    return described


def _load(
    directory: Path, described: Mapping[str, Any], *, every_block: bool
) -> npt.NDArray[np.integer]:
    path = directory / Path(str(described["file"])).name
    found = path.stat()
    if found.st_size != described["bytes"]:
        raise ValueError(f"`{path.name}` has {found.st_size} bytes")
    if every_block or found.st_mtime_ns != described["mtime_ns"]:
        if _checksum(path) != described["crc32"]:
            raise ValueError(f"`{path.name}` has another checksum")
        with suppress(OSError):  # another user's file: the next start computes the checksum again
            os.utime(path, ns=(found.st_atime_ns, int(described["mtime_ns"])))
    elif blocks := described.get("blocks_crc32"):  # absent in the files of older versions
        last = len(blocks) - 1
        sample = {0, last, *random.sample(range(last + 1), min(_SAMPLED - 2, last + 1))}
        for i in range(last + 1) if last < _SAMPLED else sorted(sample):
            if _block_checksum(path, i) != blocks[i]:
                raise ValueError(f"`{path.name}` has another checksum near byte {i * _BLOCK}")
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(values)


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = crc32(chunk, crc)
    return crc


def _block_checksum(path: Path, block: int) -> int:
    with path.open("rb", buffering=0) as file:
        file.seek(block * _BLOCK)
        return crc32(file.read(_BLOCK))


def _description_checksum(described: object) -> int:
    return crc32(json.dumps(described, sort_keys=True).encode())
