"""A run's own copy of its tokenizer: what generation needs beside the weights.

    tokenizer/tokenizer.json    type, files, options and fingerprint
    tokenizer/vocab.json        for the types that have one; of WordPiece vocab.txt
    tokenizer/merges.txt        likewise
    tokenizer/tokenizer.model   a SentencePiece model
    tokenizer/pretrained/       tokenizer.json and what stands beside it, of a pretrained tokenizer

The directory appears in one step, so that it is there in whole or not at all.  The fingerprint is
compared when it is loaded: weights mean nothing under another vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, tokenizer_from
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.durable import atomic_directory
from lmcore.errors import ConfigError, DataError

__all__ = ["RECORD_NAME", "load_tokenizer", "save_tokenizer"]

RECORD_NAME = "tokenizer.json"

_VOCABULARIES = ("vocab.json", "vocab.txt")
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_file": _VOCABULARIES,
        "merge_file": ("merges.txt",),
        "tokenizer_model": ("tokenizer.model",),
        "tokenizer_name_or_path": ("pretrained",),
    }
)
"""What a file or directory is called in the copy, by the option that gives it."""
# These are in every record, the others in those that have them.
_KEYS = ("type", "vocab_file", "merge_file", "vocab_size", "fingerprint")
_ALL_KEYS = {*_KEYS, *(field.name for field in fields(TokenizerSettings)[1:])}
_OF_PLUGINS = {"type", "vocab_file", "merge_file", "vocab_size"}
_MAX_RECORD_BYTES = 64 * 1024
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, replace: bool = False) -> None:
    """Copy *tokenizer* and its files to *directory*; nothing is done where it stands there already.

    Args:
        tokenizer: What the run encodes with.
        directory: `tokenizer/` of a run directory; its parent exists.
        replace: Whether another tokenizer there gives way, as where no weights depend on it.

    Raises:
        DataError: Another tokenizer stands there and does not give way, this one has files that a
            copy cannot name, or the disk refuses.
    """
    record = _record_of(tokenizer)
    if directory.exists() and _stands(directory, record, refuse=not replace):
        return
    try:
        with atomic_directory(directory, replace=True) as temporary:
            for name, source in _copies(tokenizer, record).items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(Path(source).read_bytes())
            (temporary / RECORD_NAME).write_bytes(f"{json.dumps(record, indent=2)}\n".encode())
    except OSError as error:
        raise DataError(
            f"cannot save the tokenizer to `{directory}`", why=error.strerror or str(error)
        ) from error


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
    described = {key: value for key, value in record.items() if key != "fingerprint"}
    for option in _NAMES:
        if described.get(option) is not None:
            described[option] = str(directory / described[option])
    tokenizer = tokenizer_from(TokenizerSettings.described(described), extra=extra)
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
    described: dict[str, Any] = tokenizer.describe()
    if isinstance(tokenizer, FileTokenizer):
        record = dict.fromkeys(_KEYS) | described
        if _is_pretrained(tokenizer):
            record.pop("tokenizer_model", None)
            record["tokenizer_name_or_path"] = "pretrained"
    else:
        named = {described.get("vocab_file"), described.get("merge_file")}
        unknown = {*tokenizer.files()} - named or {*described} - _OF_PLUGINS
        if unknown:
            raise DataError(
                f"tokenizer `{tokenizer.name}` cannot be saved with a run",
                why=f"it is built from `{min(map(str, unknown))}`, and a run keeps only "
                "`vocab_file`, `merge_file` and `vocab_size`",
                hint="the plugin's tokenizer must describe itself by these",
            )
        record = dict.fromkeys(_KEYS) | described
    for option, names in _NAMES.items():
        if record.get(option) is not None:
            suffix = Path(str(record[option])).suffix
            record[option] = next((name for name in names if name.endswith(suffix)), names[0])
    return record | {"fingerprint": tokenizer.fingerprint()}


def _is_pretrained(tokenizer: Tokenizer) -> bool:
    """Return whether all that *tokenizer* is read from goes into one directory."""
    return BUILT_IN_TYPES[tokenizer.name] is BUILT_IN_TYPES["PretrainedFromHF"]


def _copies(tokenizer: Tokenizer, record: Mapping[str, Any]) -> dict[str, str]:
    """Return where each file of the copy comes from."""
    if record.get("tokenizer_name_or_path") is not None:
        pipeline, *beside = tokenizer.files()
        copies = {f"pretrained/{Path(path).name}": path for path in beside}
        return {"pretrained/tokenizer.json": pipeline, **copies}
    described = tokenizer.describe()
    return {
        record[option]: str(described[option])
        for option in _NAMES
        if record.get(option) is not None
    }


def _stands(directory: Path, record: Mapping[str, Any], *, refuse: bool) -> bool:
    """Say whether the tokenizer of *record* is in *directory*; False where what is there is broken.

    Raises:
        DataError: Another one is, and that is to be refused.
    """
    try:
        there = _read_record(directory)
    except DataError:
        return False
    if there["fingerprint"] != record["fingerprint"]:
        if not refuse:
            return False
        raise DataError(
            f"`{directory}` holds another tokenizer",
            why=f"a `{there['type']}` with fingerprint {there['fingerprint'][:16]}, and this run "
            f"has a `{record['type']}` with {record['fingerprint'][:16]}",
            hint="save the run in a directory of its own",
        )
    names = [there[option] for option in _NAMES if there.get(option) is not None]
    paths = [f"{name}/tokenizer.json" if name == "pretrained" else name for name in names]
    return all((directory / path).is_file() for path in paths)


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
    if not isinstance(record, dict) or not set(_KEYS) <= set(record) <= _ALL_KEYS:
        return False
    if not all(isinstance(record[key], str) for key in ("type", "fingerprint")):
        return False
    try:
        TokenizerSettings.described({k: v for k, v in record.items() if k != "fingerprint"})
    except ConfigError:
        return False
    return all(record.get(option) in {None, *names} for option, names in _NAMES.items())
