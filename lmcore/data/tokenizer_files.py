"""A run's own copy of its tokenizer: what generation needs beside the weights.

    tokenizer/tokenizer.json    {"type", "vocab_file", "merge_file", "vocab_size", "fingerprint"}
    tokenizer/vocab.json        for the types that have one
    tokenizer/merges.txt        likewise

The directory appears in one step, so that it is there in whole or not at all.  The fingerprint is
compared when it is loaded: weights mean nothing under another vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, build_tokenizer
from lmcore.errors import DataError

__all__ = ["RECORD_NAME", "load_tokenizer", "save_tokenizer"]

RECORD_NAME = "tokenizer.json"

_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
_KEYS = ("type", *_FILES, "vocab_size", "fingerprint")
_MAX_RECORD_BYTES = 64 * 1024
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copy *tokenizer* and its files to *directory*; nothing is done where it stands there already.

    Args:
        tokenizer: What the run encodes with.
        directory: `tokenizer/` of a run directory; its parent exists.

    Raises:
        DataError: Another tokenizer stands there, this one has files that a copy cannot name, or
            the disk refuses.
    """
    record = _record_of(tokenizer)
    if directory.exists() and _stands(directory, record):
        return
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        described = tokenizer.describe()
        for argument, name in _FILES.items():
            if record[argument] is not None:
                _write(temporary / name, Path(str(described[argument])).read_bytes())
        _write(temporary / RECORD_NAME, (json.dumps(record, indent=2) + "\n").encode())
        _replace(temporary, directory)
    except OSError as error:
        raise DataError(
            f"cannot save the tokenizer to `{directory}`", why=error.strerror or str(error)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_tokenizer(directory: Path, *, extra: Mapping[str, TokenizerFactory] = _NONE) -> Tokenizer:
    """Rebuild the tokenizer that `save_tokenizer` wrote.

    Args:
        directory: `tokenizer/` of a run directory.
        extra: The types that plugins registered.

    Raises:
        DataError: Missing, broken, or not the tokenizer that was saved.
        ConfigError: A type that no installed plugin brings.
    """
    record = _read_record(directory)
    paths = {
        argument: None if record[argument] is None else str(directory / record[argument])
        for argument in _FILES
    }
    tokenizer = build_tokenizer(
        record["type"], **paths, vocab_size=record["vocab_size"], extra=extra
    )
    found = tokenizer.fingerprint()
    if found != record["fingerprint"]:
        raise DataError(
            f"the tokenizer in `{directory}` is not the one that was saved there",
            why=f"its fingerprint is {found[:16]}, and `{RECORD_NAME}` has "
            f"{record['fingerprint'][:16]}: a file was altered or exchanged",
            hint="restore the directory from where the run was trained",
        )
    return tokenizer


def _record_of(tokenizer: Tokenizer) -> dict[str, Any]:
    described = tokenizer.describe()
    files = {argument: described.get(argument) for argument in _FILES}
    unnamed = set(tokenizer.files()) - set(files.values())
    unknown = set(described) - set(_KEYS)
    if unnamed or unknown:
        raise DataError(
            f"tokenizer `{tokenizer.name}` cannot be saved with a run",
            why=f"it is built from `{min(map(str, unnamed or unknown))}`, and a run keeps only "
            "`vocab_file`, `merge_file` and `vocab_size`",
            hint="the plugin's tokenizer must describe itself by these",
        )
    return {
        "type": described["type"],
        **{argument: _FILES[argument] if path else None for argument, path in files.items()},
        "vocab_size": described.get("vocab_size"),
        "fingerprint": tokenizer.fingerprint(),
    }


def _stands(directory: Path, record: Mapping[str, Any]) -> bool:
    """Say whether the tokenizer of *record* is in *directory*; False where what is there is broken.

    Raises:
        DataError: Another one is.
    """
    try:
        there = _read_record(directory)
    except DataError:
        return False
    if there["fingerprint"] != record["fingerprint"]:
        raise DataError(
            f"`{directory}` holds another tokenizer",
            why=f"a `{there['type']}` with fingerprint {there['fingerprint'][:16]}, and this run "
            f"has a `{record['type']}` with {record['fingerprint'][:16]}",
            hint="save the run in a directory of its own",
        )
    return all((directory / there[name]).is_file() for name in _FILES if there[name] is not None)


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / RECORD_NAME
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"no tokenizer in `{directory}`",
            why=f"cannot read `{path.name}`: {error.strerror or error}",
            hint="give a run directory of `lmcore train`, or the tokenizer by "
            "`--tokenizer-type`, `--vocab-file` and `--merge-file`",
        ) from None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    if len(content) > _MAX_RECORD_BYTES or not _well_formed(record):
        raise DataError(
            f"`{path}` does not describe a tokenizer",
            why=f"expected an object with {', '.join(f'`{key}`' for key in _KEYS)}, its files "
            "named without a directory",
        )
    return dict(record)


def _well_formed(record: object) -> bool:
    if not isinstance(record, dict) or set(record) != set(_KEYS):
        return False
    named = all(record[argument] in (None, name) for argument, name in _FILES.items())
    size = record["vocab_size"]
    sized = size is None or (isinstance(size, int) and not isinstance(size, bool))
    return named and sized and all(isinstance(record[key], str) for key in ("type", "fingerprint"))


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _replace(temporary: Path, directory: Path) -> None:
    """Give *temporary* the name *directory*; a broken one there is moved away first."""
    if directory.exists():
        broken = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
        shutil.rmtree(broken, ignore_errors=True)
        directory.rename(broken)
        temporary.rename(directory)
        shutil.rmtree(broken, ignore_errors=True)
    else:
        temporary.rename(directory)
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
