"""Copy of the tokenizer in a run directory, which generation needs beside the weights.

    tokenizer/tokenizer.json    type, files, options and fingerprint
    tokenizer/vocab.json        of a BPE; vocab.txt of WordPiece
    tokenizer/merges.txt        of a BPE
    tokenizer/tokenizer.model   a SentencePiece model
    tokenizer/pretrained/       tokenizer.json of a pretrained tokenizer, its configuration files,
                                chat templates and generation_config.json

The directory is renamed into place, so that it is never incomplete.  The fingerprint is compared
when the tokenizer is loaded: weights are useless with another vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import atomic_directory
from lmcore.base.errors import ConfigError, DataError
from lmcore.config.tokenizer import BUILT_IN_TYPES, COPIED_FILES, TokenizerSettings
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, tokenizer_from
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer

__all__ = ["RECORD_NAME", "load_tokenizer", "save_tokenizer", "saved_tokenizer_settings"]

RECORD_NAME = "tokenizer.json"

# Keys of every record; the others are optional.
_KEYS = ("type", "vocab_file", "merge_file", "vocab_size", "fingerprint")
_ALL_KEYS = {*_KEYS, *(field.name for field in fields(TokenizerSettings)[1:])}
_OF_PLUGINS = {"type", "vocab_file", "merge_file", "vocab_size"}
_MAX_RECORD_BYTES = 64 * 1024
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, replace: bool = False) -> None:
    """Copy *tokenizer* and its files to *directory*, unless the same one is saved there already.

    Args:
        tokenizer: the run's tokenizer.
        directory: `tokenizer/` of a run directory; its parent exists.
        replace: replace another tokenizer there, for a run whose weights do not depend on it.

    Raises:
        DataError: another tokenizer is saved there, a plugin's tokenizer has files that a copy
            cannot name, or the file system refuses.
    """
    record = _record_of(tokenizer)
    if directory.exists() and _is_saved(directory, record, refuse=not replace):
        return
    try:
        with atomic_directory(directory, replace=True) as temporary:
            for name, source in _copies(tokenizer, record).items():
                (temporary / name).parent.mkdir(exist_ok=True, parents=True)
                (temporary / name).write_bytes(Path(source).read_bytes())
            (temporary / RECORD_NAME).write_bytes(f"{json.dumps(record, indent=2)}\n".encode())
    except OSError as error:
        raise DataError(
            f"cannot save the tokenizer to `{directory}`", why=error.strerror or str(error)
        ) from error


def load_tokenizer(directory: Path, *, extra: Mapping[str, TokenizerFactory] = _NONE) -> Tokenizer:
    """Build the tokenizer that `save_tokenizer` wrote.

    Args:
        directory: `tokenizer/` of a run directory.
        extra: tokenizer types that plugins registered, by name.

    Raises:
        DataError: missing, broken, or changed since it was saved.
        ConfigError: the type belongs to a plugin that is not installed.
    """
    record = _read_record(directory)
    tokenizer = tokenizer_from(_settings_of(record, directory), extra=extra)
    found = tokenizer.fingerprint()
    if found != record["fingerprint"]:
        raise DataError(
            f"the tokenizer in `{directory}` is not the one that was saved there",
            why=f"its fingerprint is {found[:16]}, `{RECORD_NAME}` has "
            f"{record['fingerprint'][:16]}: a file was changed",
            hint="restore the directory from the run's original",
        )
    return tokenizer


def saved_tokenizer_settings(directory: Path) -> TokenizerSettings | None:
    """Return the settings of the tokenizer that `save_tokenizer` wrote; None if there is none.

    Args:
        directory: `tokenizer/` of a run directory.

    Raises:
        DataError: its record is broken.
    """
    if not directory.is_dir():
        return None
    return _settings_of(_read_record(directory), directory)


def _settings_of(record: Mapping[str, Any], directory: Path) -> TokenizerSettings:
    described = {key: value for key, value in record.items() if key != "fingerprint"}
    for option in COPIED_FILES:
        if described.get(option) is not None:
            described[option] = str(directory / described[option])
    return TokenizerSettings.described(described)


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
                why=f"it is built from `{min(map(str, unknown))}`; a run keeps only `vocab_file`, "
                "`merge_file` and `vocab_size`",
                hint="the plugin's tokenizer must be described by these three",
            )
        record = dict.fromkeys(_KEYS) | described
    for option, names in COPIED_FILES.items():
        if record.get(option) is not None:
            suffix = Path(str(record[option])).suffix
            record[option] = next((name for name in names if name.endswith(suffix)), names[0])
    return record | {"fingerprint": tokenizer.fingerprint()}


def _is_pretrained(tokenizer: Tokenizer) -> bool:
    """Return True if all files of *tokenizer* go into one directory."""
    return BUILT_IN_TYPES[tokenizer.name] is BUILT_IN_TYPES["PretrainedFromHF"]


def _copies(tokenizer: Tokenizer, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the source path of each file of the copy."""
    if record.get("tokenizer_name_or_path") is not None:
        pipeline, *beside = tokenizer.files()
        folder = Path(pipeline).parent
        copies = {f"pretrained/{Path(path).relative_to(folder)}": path for path in beside}
        return {"pretrained/tokenizer.json": pipeline, **copies}
    described = tokenizer.describe()
    return {
        record[option]: str(described[option])
        for option in COPIED_FILES
        if record.get(option) is not None
    }


def _is_saved(directory: Path, record: Mapping[str, Any], *, refuse: bool) -> bool:
    """Return True if the tokenizer of *record* is in *directory*; False if the copy is broken.

    Raises:
        DataError: another tokenizer is there, and *refuse* is set.
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
            why=f"a `{there['type']}` with fingerprint {there['fingerprint'][:16]}; this run has a "
            f"`{record['type']}` with {record['fingerprint'][:16]}",
            hint="save the run in another directory",
        )
    names = [there[option] for option in COPIED_FILES if there.get(option) is not None]
    paths = [f"{name}/tokenizer.json" if name == "pretrained" else name for name in names]
    return all((directory / path).is_file() for path in paths)


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / RECORD_NAME
    try:
        content = read_bounded_file(path, _MAX_RECORD_BYTES)
    except OSError as error:
        raise DataError(
            f"no tokenizer in `{directory}`",
            why=f"cannot read `{path.name}`: {error.strerror or error}",
            hint="give a run directory of `lmcore train`, or name the tokenizer with "
            "`--tokenizer-type`, `--vocab-file` and `--merge-file`",
        ) from None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    if not _well_formed(record):
        raise DataError(
            f"`{path}` does not describe a tokenizer",
            why=f"expected an object with {', '.join(f'`{key}`' for key in _KEYS)}, and file "
            "names without a directory",
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
    return all(record.get(option) in {None, *names} for option, names in COPIED_FILES.items())
