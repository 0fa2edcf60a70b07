"""State of an unfinished preparation, and record of a completed one, for `--resume`.

The state is `state.json` in the directory of the output.  It is written after each shard,
with the identity of the input and of all settings that the output depends on.  A run with another
identity cannot resume; the error lists the differences.

The record is `PREFIX.prepared.json`: a job that is restarted after its dataset is complete ends at
once instead of starting over.  Runs with `--resume` write it; it is valid as long as the files are
unchanged.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, counted, unreadable
from lmcore.data.indexed.files import replacing
from lmcore.data.indexed.metadata import metadata_path
from lmcore.data.input.files import InputFile
from lmcore.data.prepare.partial_dataset import DatasetCounts
from lmcore.data.prepare.request import KeyReport, PrepareReport, PrepareRequest

__all__ = [
    "INDENT",
    "Identity",
    "PrepareState",
    "changed_files",
    "changed_settings",
    "identity_of",
    "read_completed",
    "read_state",
    "remove_completed",
    "require_same",
    "write_completed",
    "write_state",
]

_VERSION = 1
_MAX_BYTES = 1 << 28  # a corpus of a million files

INDENT = "\n     "
"""Separator of the reasons of an error, to align them after `why: `."""

Identity = dict[str, Any]
"""Identity of input and settings, as JSON values."""
_COMPLETED_VERSION = 1


@dataclass(frozen=True)
class PrepareState:
    """Complete part of a preparation.

    Attributes:
        shards: number of complete shards.
        file: index of the input file of the next document, from 0.
        batches: number of complete batches of that file.
        documents: number of documents in the complete shards.
        json_bytes: size of these documents, in bytes, uncompressed.
        seconds: time spent on them.
        skipped: number of skipped documents by reason.
        keys: contents of the files of each key.
    """

    shards: int
    file: int
    batches: int
    documents: int
    json_bytes: int
    seconds: float
    skipped: dict[str, int]
    keys: tuple[DatasetCounts, ...]

    @classmethod
    def start(cls, num_keys: int) -> PrepareState:
        """Return the state before the first document."""
        return cls(0, 0, 0, 0, 0, 0.0, {}, (DatasetCounts(),) * num_keys)


def identity_of(
    request: PrepareRequest, files: Sequence[InputFile], dtype: np.dtype[np.integer]
) -> Identity:
    """Return the identity of the input and of the settings that the output depends on.

    A file is identified by path, size and modification time.  The error policy and the number of
    workers are not part of it.
    """
    reading = asdict(request.reading)
    for name in ("keys", "key_flags", "skip", "batch_bytes"):
        reading.pop(name, None)
    settings = {
        "tokenizer": request.tokenizer.name,
        "tokenizer fingerprint": request.tokenizer.fingerprint(),
        "--json-keys": list(request.json_keys),
        "--append-eod": request.append_eod,
        "sentences": request.splitter.describe() if request.splitter is not None else None,
        "--dataset-impl": request.dataset_impl,
        "token type": dtype.name,
        "partition": [request.partition, request.partitions],
        "--shuffle": request.shuffle,
        **{f"reading: {name}": value for name, value in reading.items()},
    }
    # The state counts batches, so that their size must not change.
    settings["batch bytes"] = request.reading.batch_bytes
    identity = {"settings": settings, "files": [_file_identity(file) for file in files]}
    return cast("Identity", json.loads(json.dumps(identity)))  # as it is read back: no tuples


def _file_identity(file: InputFile) -> list[Any]:
    path = Path(file.path)
    try:
        found = path.stat()
    except OSError:
        return [file.path, file.format, None, None]
    if not path.is_file():
        return [file.path, file.format, None, None]
    return [str(path.resolve()), file.format, found.st_size, found.st_mtime_ns]


def require_same(recorded: Identity, present: Identity, folder: Path) -> None:
    """Raise `ConfigError` with the differences if the identities differ."""
    changes = changed_settings(recorded, present)
    changes += changed_files(recorded["files"], present["files"])
    if changes:
        shown = changes[:8] + ([f"and {len(changes) - 8} more"] if len(changes) > 8 else [])
        raise ConfigError(
            f"`{folder}` belongs to a run with other input or settings",
            why=INDENT.join(shown),
            hint="resume with the original input and settings, or remove the directory and start "
            "again without `--resume`",
        )


def changed_settings(recorded: Identity, present: Identity) -> list[str]:
    """Return a description of each setting that differs."""
    return [
        f"{name}: was `{_shown(recorded['settings'].get(name))}`, is `{_shown(value)}`"
        for name, value in present["settings"].items()
        if recorded["settings"].get(name) != value
    ]


def _shown(value: object) -> str:
    """Return a setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value)


def changed_files(before: Sequence[list[Any]], now: Sequence[list[Any]]) -> list[str]:
    """Return a description of each difference between input files.

    Args:
        before: recorded files, each `[path, format, size, ...]`.
        now: files of this run.
    """
    changes = []
    if len(before) != len(now):
        changes.append(f"input: was {counted(len(before), 'file')}, is {len(now)}")
    names, others = Counter(file[0] for file in before), Counter(file[0] for file in now)
    changes += [f"input: `{name}` is missing" for name in (names - others).elements()]
    changes += [f"input: `{name}` is new" for name in (others - names).elements()]
    if not changes and [file[0] for file in before] != [file[0] for file in now]:
        return ["input: the order of the files differs"]
    if changes:  # compare the common files by name
        known = {file[0]: file for file in before}
        pairs = [(known[file[0]], file) for file in now if file[0] in known]
    else:
        pairs = list(zip(before, now, strict=True))
    return changes + [_file_difference(old, new) for old, new in pairs if old != new]


def _file_difference(old: list[Any], new: list[Any]) -> str:
    if old[1] != new[1]:
        return f"`{new[0]}`: was read as {old[1]}, is {new[1]}"
    if old[2] != new[2]:
        return f"`{new[0]}`: had {counted(old[2], 'byte')}, has {new[2]:,}"
    return f"`{new[0]}`: was modified"


def write_state(path: Path, identity: Identity, state: PrepareState) -> None:
    """Write the state atomically.

    Raises:
        DataError: the file system refuses.
    """
    content = {"version": _VERSION, "identity": identity, "state": asdict(state)}
    with replacing(path) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def read_state(path: Path) -> tuple[Identity, PrepareState] | None:
    """Return identity and state, or None if no shard is complete.

    Raises:
        DataError: the file is damaged.
    """
    try:
        content = json.loads(read_bounded_file(path, _MAX_BYTES))
        identity, state = content["identity"], _state_of(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"cannot read `{path}`",
            why=unreadable(error) if isinstance(error, OSError) else str(error),
            hint="remove the directory and start again without `--resume`",
        ) from None
    return identity, state


def _state_of(content: dict[str, Any]) -> PrepareState:
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']}")
    identity, values = content["identity"], content["state"]
    if not isinstance(identity["settings"], dict) or not isinstance(identity["files"], list):
        raise ValueError("it has no identity")
    values["keys"] = tuple(DatasetCounts(**counts) for counts in values["keys"])
    return PrepareState(**{field.name: values[field.name] for field in fields(PrepareState)})


_log = logging.getLogger(__name__)


def _path(request: PrepareRequest) -> Path:
    return Path(f"{request.prefix}.prepared.json")


def remove_completed(request: PrepareRequest) -> None:
    """Remove the record of an older dataset before its files are replaced."""
    _path(request).unlink(missing_ok=True)


def write_completed(request: PrepareRequest, identity: Identity, report: PrepareReport) -> None:
    """Write the record after all files have their final names.

    Raises:
        DataError: the file system refuses.
    """
    content = {
        "version": _COMPLETED_VERSION,
        "identity": identity,
        "files": _files(request),
        "report": asdict(report),
    }
    with replacing(_path(request)) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def read_completed(request: PrepareRequest, identity: Identity) -> PrepareReport | None:
    """Return the report of an earlier run with the same input and settings; None if there is none.

    For a dataset of other input or settings, log the differences and return None.
    """
    try:
        content = json.loads(read_bounded_file(_path(request), _MAX_BYTES))
        if content["version"] != _COMPLETED_VERSION or content["files"] != _files(request):
            return None
        recorded, report = content["identity"], _report_of(content["report"])
        changes = changed_settings(recorded, identity)
        changes += changed_files(recorded["files"], identity["files"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ):
        return None  # not written by this version
    if changes:
        listed = "; ".join(changes[:3])
        _log.warning("`%s` has other input or settings; %s", request.prefix, listed)
        return None
    _log.warning(
        "`%s` is complete, from the same input and settings: nothing to do",
        request.prefix,
    )
    return report


def _files(request: PrepareRequest) -> list[list[Any]]:
    """Return name, size and modification time of each file of the datasets."""
    paths = []
    for prefix in map(request.key_prefix, request.json_keys):
        paths += [Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(metadata_path(prefix))]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _report_of(values: dict[str, Any]) -> PrepareReport:
    outputs = tuple(KeyReport(**output) for output in values["outputs"])
    return PrepareReport(**{**values, "files": tuple(values["files"]), "outputs": outputs})
