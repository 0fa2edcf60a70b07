"""How far a preparation came: `state.json` in the directory of its unfinished output.

It is written when a shard is complete, and bound to the input and to everything that decides the
output's bytes: what continues under other circumstances is refused, with what differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from lmcore.data.indexed.files import replacing
from lmcore.data.input.files import InputFile
from lmcore.data.prepare.partial_dataset import DatasetCounts
from lmcore.data.prepare.request import PrepareRequest
from lmcore.errors import ConfigError, DataError, counted

__all__ = [
    "INDENT",
    "Identity",
    "PrepareState",
    "changed_files",
    "changed_settings",
    "identity_of",
    "read_state",
    "require_same",
    "write_state",
]

_VERSION = 1
_MAX_BYTES = 1 << 28  # a corpus of a million files

INDENT = "\n     "
"""Parts the reasons of an error, below one another after `why: `."""

Identity = dict[str, Any]
"""What a preparation is bound to; JSON values."""


@dataclass(frozen=True)
class PrepareState:
    """What is complete.

    Attributes:
        shards: Number of complete shards.
        file: Number of the input file that the next document comes from, from 0.
        batches: Batches of that file that are done.
        documents: Of the complete shards.
        json_bytes: Likewise.
        seconds: Spent on them.
        skipped: Documents left out, by reason.
        keys: What the files of each key hold.
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
    """Return what decides the output's bytes, and which input that was.

    A file counts as the same where path, size and time of change are.  What is done about bad
    documents and the number of workers may change between two runs.
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
        **{f"reading: {name}": value for name, value in reading.items()},
    }
    # The batches are counted, so that their size must stay.
    settings["batch bytes"] = request.reading.batch_bytes
    identity = {"settings": settings, "files": [_file_identity(file) for file in files]}
    return cast("Identity", json.loads(json.dumps(identity)))  # as it will be read: no tuples


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
    """Raise `ConfigError` with every difference between a recorded identity and the present one."""
    told = changed_settings(recorded, present)
    told += changed_files(recorded["files"], present["files"])
    if told:
        shown = told[:8] + ([f"and {len(told) - 8} more"] if len(told) > 8 else [])
        raise ConfigError(
            f"`{folder}` was begun from another input or with other settings",
            why=INDENT.join(shown),
            hint="run it as it was begun, or remove the directory and start again without "
            "`--resume`",
        )


def changed_settings(recorded: Identity, present: Identity) -> list[str]:
    """Return what each setting was that is another now."""
    return [
        f"{name}: was `{_shown(recorded['settings'].get(name))}`, is `{_shown(value)}`"
        for name, value in present["settings"].items()
        if recorded["settings"].get(name) != value
    ]


def _shown(value: object) -> str:
    """Return a setting as it is typed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value)


def changed_files(before: Sequence[list[Any]], now: Sequence[list[Any]]) -> list[str]:
    """Return what is different about the files of the input, each `[path, format, size, ...]`."""
    told = []
    if len(before) != len(now):
        told.append(f"input: was {counted(len(before), 'file')}, is {len(now)}")
    names, others = Counter(file[0] for file in before), Counter(file[0] for file in now)
    told += [f"input: `{name}` is gone" for name in (names - others).elements()]
    told += [f"input: `{name}` is new" for name in (others - names).elements()]
    if not told and [file[0] for file in before] != [file[0] for file in now]:
        return ["input: the files come in another order"]
    if told:  # the others are compared by their names
        known = {file[0]: file for file in before}
        pairs = [(known[file[0]], file) for file in now if file[0] in known]
    else:
        pairs = list(zip(before, now, strict=True))
    return told + [_file_difference(old, new) for old, new in pairs if old != new]


def _file_difference(old: list[Any], new: list[Any]) -> str:
    if old[1] != new[1]:
        return f"`{new[0]}`: was read as {old[1]}, is {new[1]}"
    if old[2] != new[2]:
        return f"`{new[0]}`: had {old[2]} bytes, has {new[2]}"
    return f"`{new[0]}`: was changed since"


def write_state(path: Path, identity: Identity, state: PrepareState) -> None:
    """Write the state; the file appears whole.

    Raises:
        DataError: The disk refuses.
    """
    content = {"version": _VERSION, "identity": identity, "state": asdict(state)}
    with replacing(path) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def read_state(path: Path) -> tuple[Identity, PrepareState] | None:
    """Return identity and state, or None where no shard was complete.

    Raises:
        DataError: The file is not what `write_state` wrote.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        identity, state = content["identity"], _state_of(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read `{path}`",
            why=str(error),
            hint="remove the directory, and start again without `--resume`",
        ) from None
    return identity, state


def _state_of(content: dict[str, Any]) -> PrepareState:
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']}")
    identity, values = content["identity"], content["state"]
    if not isinstance(identity["settings"], dict) or not isinstance(identity["files"], list):
        raise ValueError("it does not say what it belongs to")
    values["keys"] = tuple(DatasetCounts(**counts) for counts in values["keys"])
    return PrepareState(**{field.name: values[field.name] for field in fields(PrepareState)})
