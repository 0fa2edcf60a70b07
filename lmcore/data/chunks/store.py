"""`ShardStore`: arrays in a directory, each with its checksum, written one by one.

    NAME.json           what the arrays are made of, a dataclass; see `begin`
    shard-00000.npy     the first array
    shard-00000.json    its size in bytes and CRC-32, written after it

Work that was stopped continues with the missing shards.  Several processes may write one store,
each the shards that no other one writes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lmcore.base.bounded_file import UnreadableFileError, read_bounded_file
from lmcore.base.crc32 import crc32
from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.base.lock import LockFile

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "Progress",
    "ShardStore",
    "begin",
    "file_crc32",
    "read_json",
    "read_record",
    "require_equal",
]

logger = logging.getLogger(__name__)

_VERSION = 1
_SMALL = 1 << 20
"""Most bytes of a JSON file, and bytes that a checksum is computed of at once."""
_WAIT_SECONDS = 0.2

Record = TypeVar("Record")
_NO_REASONS: Mapping[str, Callable[[Any, Any], str]] = MappingProxyType({})


class ShardStore:
    """Directory of numbered arrays.

    Attributes:
        path: The directory.
        noun: Name of its kind in messages, such as `index`.
        command: Command that builds it, for hints.
    """

    def __init__(self, path: Path, noun: str, command: str) -> None:
        self.path, self.noun, self.command = path, noun, command

    @property
    def article(self) -> str:
        """Indefinite article of the noun."""
        return "an" if self.noun[0] in "aeiou" else "a"

    def file(self, number: int) -> Path:
        """Return the path of an array."""
        return self.path / f"shard-{number:05d}.npy"

    def is_complete(self, number: int, rows: int = 0) -> bool:
        """Return True if a shard is there with its checksum, which is not compared.

        Args:
            number: Number of the shard.
            rows: Rows that it must have at least.
        """
        path = self.file(number)
        try:
            checksum = read_json(path.with_suffix(".json"))
            if path.stat().st_size != checksum["bytes"]:
                return False
            return not rows or len(np.load(path, mmap_mode="r", allow_pickle=False)) >= rows
        except (OSError, UnreadableFileError, KeyError, TypeError, ValueError):
            return False

    def missing(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the shards that are not there with as many rows.

        Args:
            rows: Rows of each shard; 0: not known.
        """
        return [number for number, one in enumerate(rows) if not self.is_complete(number, one)]

    def write(self, number: int, array: npt.NDArray[Any]) -> None:
        """Write a shard, or replace it."""
        buffer = io.BytesIO()
        np.save(buffer, array)
        content, path = buffer.getvalue(), self.file(number)
        write_atomically(path, content)
        checksum = {"bytes": len(content), "crc32": crc32(content)}
        write_atomically(path.with_suffix(".json"), json.dumps(checksum).encode())

    def build(
        self,
        rows: Sequence[int],
        make: Callable[[int], npt.NDArray[Any]],
        *,
        wait: bool,
        unit: str,
    ) -> None:
        """Write the missing shards, except the ones that other processes write.

        Args:
            rows: Rows of each shard; 0: not known.
            make: Function that returns a shard.
            wait: True to wait for the shards of other processes, and to write the shard of a
                process that ends before it is written.
            unit: Name of a row, for the log.
        """
        missing = self.missing(rows)
        if done := len(rows) - len(missing):
            logger.info("%s: found %d of %s", self.noun, done, counted(len(rows), "shard"))
        progress = Progress(len(missing), unit)
        while missing:
            for number in missing:
                with LockFile(self.path / f".shard-{number:05d}.lock").held() as own:
                    if not own or self.is_complete(number, rows[number]):
                        continue
                    array = make(number)
                    self.write(number, array)
                progress.report(len(array), f"{self.noun}: shard {number + 1} of {len(rows)}")
            missing = [number for number in missing if not self.is_complete(number, rows[number])]
            if not wait:
                return
            if missing:
                time.sleep(_WAIT_SECONDS)
            progress.remain(len(missing))

    def open(self, number: int, *, verify: bool = True) -> npt.NDArray[Any]:
        """Return a shard as a read-only view of its file.

        Args:
            number: Number of the shard.
            verify: True to compare the whole file with its checksum, not only its size.

        Raises:
            DataError: It is missing or damaged.
        """
        path, problem = self.file(number), ""
        found: npt.NDArray[Any] | None = None
        try:
            checksum = read_json(path.with_suffix(".json"))
            if path.stat().st_size != checksum["bytes"]:
                problem = f"it has {path.stat().st_size:,} bytes of {checksum['bytes']:,}"
            else:
                found = np.load(path, mmap_mode="r", allow_pickle=False)
                if verify and file_crc32(path) != checksum["crc32"]:
                    problem = "its checksum differs"
        except (OSError, UnreadableFileError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
        if problem or found is None:
            raise self.damaged(number, problem)
        return found

    def damaged(self, number: int, problem: str) -> DataError:
        """Return the error for a damaged shard."""
        return DataError(
            f"`{self.file(number)}` is damaged",
            why=problem,
            hint=f"remove it, and run the same `{self.command}` again",
        )

    def require_complete(self, rows: Sequence[int]) -> None:
        """Refuse a store with missing shards.

        Args:
            rows: Rows of each shard; 0: not known.

        Raises:
            DataError: Shards are missing.
        """
        if missing := self.missing(rows):
            raise DataError(
                f"the {self.noun} `{self.path}` is half built",
                why=f"{counted(len(missing), 'shard')} of {len(rows)} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                hint=f"run the same `{self.command}` again: it builds the missing ones",
            )


class Progress:
    """Report of shards that are done, with the time left.

    Args:
        total: Number of shards to do.
        unit: Name of a row.
    """

    def __init__(self, total: int, unit: str) -> None:
        self._unit, self._left, self._rows, self._shards = unit, total, 0, 0
        self._began = time.monotonic()

    def remain(self, left: int) -> None:
        """Correct the number of shards that are left: other processes did some."""
        self._left = left

    def report(self, rows: int, what: str) -> None:
        """Log a shard that is done."""
        self._rows += rows
        self._shards += 1
        self._left = max(self._left - 1, 0)
        seconds = max(time.monotonic() - self._began, 1e-9)
        left = _duration(seconds / self._shards * self._left)
        logger.info(
            "%s, %s %s/s%s",
            *(what, f"{self._rows / seconds:,.0f}", self._unit),
            f", {left} left" if self._left else "",
        )


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{hours} h"


def _write_record(path: Path, record: Any) -> None:
    """Write a dataclass of numbers, texts and tuples of them as JSON, with its version."""
    values = {"version": _VERSION, **dataclasses.asdict(record)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(values, indent=2).encode())


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int,
    "tuple[str, ...]": lambda value: (
        isinstance(value, list) and all(isinstance(one, str) for one in value)
    ),
    "tuple[int, ...]": lambda value: (
        isinstance(value, list) and all(type(one) is int for one in value)
    ),
}


def read_record(path: Path, kind: type[Record], store: ShardStore) -> Record:
    """Return the record of a store, whose author is not known.

    Args:
        path: Its file.
        kind: Its dataclass; the class variable `counts` names the fields that are at least 1.
        store: The store that it belongs to, for messages.

    Raises:
        DataError: It is missing or malformed.
    """
    if not path.is_file():
        raise DataError(
            f"`{path.parent}` is no {store.noun}",
            why=f"it has no `{path.name}`",
            hint=f"`{store.command}` makes one",
        )
    fields = {one.name: str(one.type) for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: Any = None
    problem = ""
    try:
        values = read_json(path)
    except (OSError, UnreadableFileError, ValueError) as error:
        problem = str(error)
    if isinstance(values, dict) and values.get("version") not in {None, _VERSION}:
        problem = f"its version is {values['version']!s:.20}, and this lmcore reads {_VERSION}"
    elif not problem and (not isinstance(values, dict) or values.keys() != {"version", *fields}):
        problem = f"it has not the keys of `{path.name}`"
    if not problem:
        values = {name: values[name] for name in fields}
        wrong = [name for name, one in fields.items() if not _KINDS[one](values[name])]
        counts: tuple[str, ...] = getattr(kind, "counts", ())
        wrong += [name for name in counts if name not in wrong and values[name] < 1]
        problem = f"`{wrong[0]}` is `{values[wrong[0]]!s:.40}`" if wrong else ""
    if problem:
        raise DataError(
            f"`{path}` is damaged", why=problem, hint="remove the directory and build it again"
        )
    lists = {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
    return kind(**{**values, **lists})


def require_equal(
    path: Path,
    record: Record,
    store: ShardStore,
    parts: Mapping[str, str],
    reasons: Mapping[str, Callable[[Record, Record], str]] = _NO_REASONS,
) -> Record:
    """Return the record that is there already, with equal parts.

    Args:
        path: File of the record, which is there.
        record: The record to compare it with.
        store: The store.
        parts: Name of each field that must be equal, in messages.
        reasons: Functions by field that say how it differs, of the record that is there and of
            *record*; a field without one is shown.

    Raises:
        ConfigError: Parts differ.
        DataError: The record that is there is damaged.
    """
    found = read_record(path, type(record), store)
    for name, words in parts.items():
        theirs, own = getattr(found, name), getattr(record, name)
        if theirs != own:
            why = f"it has {_short(theirs)}, and this one would have {_short(own)}"
            raise ConfigError(
                f"`{path.parent}` is {store.article} {store.noun} with another {words}",
                why=reasons[name](found, record) if name in reasons else why,
                hint="give another directory, or remove this one",
            )
    return found


def begin(
    path: Path,
    record: Record,
    store: ShardStore,
    parts: Mapping[str, str],
    reasons: Mapping[str, Callable[[Record, Record], str]] = _NO_REASONS,
) -> bool:
    """Write the record of a store; return False if it is there already, with equal parts.

    Fields that are no parts, such as paths, are replaced if they differ.

    Args:
        path: File of the record.
        record: The record, a dataclass of numbers, texts and tuples of them.
        store: The store.
        parts, reasons: See `require_equal`.

    Raises:
        ConfigError: The directory has a store of other parts, or other files.
        DataError: The record that is there is damaged.
    """
    directory = path.parent
    for one in (directory, *directory.parents):
        if one.exists() and not one.is_dir():
            raise ConfigError(
                f"`{one}` is a file, not a directory",
                hint=f"name a directory for the {store.noun}, which is made",
            )
    if path.exists():
        if require_equal(path, record, store, parts, reasons) != record:
            _write_record(path, record)
        return False
    names = [one.name for one in directory.iterdir()] if directory.exists() else []
    if path.name not in names and any(name[0] != "." for name in names):
        raise ConfigError(
            f"`{directory}` is not empty, and no {store.noun}",
            hint="give a directory of its own",
        )
    _write_record(path, record)
    return True


def _short(value: Any) -> str:
    values = value if isinstance(value, tuple) else [value]
    return ", ".join(str(one)[:16] for one in values[:4])


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file.

    Raises:
        OSError, UnreadableFileError, ValueError: It cannot be read, is too large, or is no JSON.
    """
    return json.loads(read_bounded_file(path, _SMALL))


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(_SMALL):
            found = crc32(part, found)
    return found
