"""Checks of a preparation before it starts: the settings, and the input files.

Of the input only the bytes that identify a file's format are read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.data.indexed.writer import FORMATS
from lmcore.data.input.compression import STDIN
from lmcore.data.input.files import InputFile, find_inputs
from lmcore.data.input.options import unused_options
from lmcore.data.prepare.request import PrepareRequest

__all__ = ["check_request", "request_problems"]


def request_problems(request: PrepareRequest) -> list[LmcoreError]:
    """Return all problems of a request."""
    return check_request(request)[1]


def check_request(request: PrepareRequest) -> tuple[list[InputFile], list[LmcoreError]]:
    """Return the input files of a request, and all its problems."""
    problems = _settings_problems(request)
    files: list[InputFile] = []
    missing: list[LmcoreError] = []
    for given in request.inputs or ("",):
        try:
            files.extend(find_inputs([given] if given else [], request.input_format))
        except LmcoreError as error:
            missing.append(error)
    problems += missing or unused_options(request.reading, files)
    problems += _given_twice(files)
    unsteady = [file.path for file in files if not Path(file.path).is_file()]
    if request.resume and unsteady:
        problems.append(
            ConfigError(
                f"`--resume` cannot read `{unsteady[0]}` a second time",
                why="it is standard input" if unsteady[0] == STDIN else "it is not a regular file",
            )
        )
    return files, problems


def _settings_problems(request: PrepareRequest) -> list[LmcoreError]:
    """Return all invalid settings of a request, without a look at any file."""
    keys = request.json_keys
    found: list[LmcoreError] = []
    if not keys or len(set(keys)) != len(keys):
        found.append(
            ConfigError(f"`--json-keys {' '.join(keys)}` must name different keys, at least one")
        )
    found.extend(
        ConfigError(f"the JSON key `{key}` cannot be part of a file name")
        for key in dict.fromkeys(keys)
        if not key or "/" in key or "\0" in key
    )
    if os.path.basename(request.output_prefix) in {"", ".", ".."}:  # noqa: PTH119  # Path drops `/`
        found.append(
            ConfigError(
                f"`--output-prefix {request.output_prefix}` does not end with a file name",
                why="the names of the output files begin with its last part",
                hint=f"for example `--output-prefix {Path(request.output_prefix) / 'web'}`",
            )
        )
    for flag, value in (
        ("--workers", request.workers),
        ("--log-interval", request.log_interval),
        ("--shard-mib", request.shard_bytes),
        ("--partitions", request.partitions),
    ):
        if value is not None and value < 1:
            found.append(ConfigError(f"`{flag} {value}` must be at least 1"))
    if request.partition is not None and not 0 <= request.partition < request.partitions:
        found.append(
            ConfigError(
                f"`--partition {request.partition}` is out of range",
                hint=f"with `--partitions {request.partitions}` it is 0 to "
                f"{max(0, request.partitions - 1)}",
            )
        )
    if request.shuffle is not None and request.partitions > 1:
        found.append(
            ConfigError(
                "`--shuffle` cannot be combined with `--partitions`",
                why="a host would shuffle the documents of its own files only",
                hint="prepare the input on one host, or shuffle the text with `lmcore data clean "
                "shuffle` first",
            )
        )
    if request.append_eod and request.tokenizer.eod is None:
        found.append(
            ConfigError(
                f"the tokenizer `{request.tokenizer.name}` has no end-of-document token",
                hint="omit `--append-eod`, or use a vocabulary that has one",
            )
        )
    if request.dataset_impl not in FORMATS:
        known = ", ".join(f"`{name}`" for name in FORMATS)
        found.append(
            ConfigError(
                f"unknown `--dataset-impl {request.dataset_impl}`",
                hint=f"known: {known}",
            )
        )
    return found


def _given_twice(files: Sequence[InputFile]) -> list[LmcoreError]:
    """Return a problem for the first file that is given twice, by the same name or another."""
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        path = Path(file.path)
        if file.path == STDIN or not path.is_file():
            continue
        inode = (path.stat().st_dev, path.stat().st_ino)
        earlier = seen.get(inode)
        seen[inode] = file.path
        if earlier is not None:
            return [
                ConfigError(
                    f"`{file.path}` is given twice"
                    if file.path == earlier
                    else f"`{file.path}` and `{earlier}` are the same file",
                    why="its documents would be prepared twice",
                    hint="check the patterns of `--input`; to train on it more often give its "
                    "dataset a larger weight",
                )
            ]
    return []
