"""Prompts from the command line, a file or standard input; torch-free."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lmcore.errors import ConfigError, DataError

__all__ = ["read_json_schema", "read_prompt_file", "read_prompt_lines", "read_stdin"]


def read_prompt_file(path: str) -> str:
    """Return a file's text as one prompt, without the line break at its end.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read.
        DataError: The file is not UTF-8.
    """
    return _one_prompt(_read(path), path)


def read_prompt_lines(path: str) -> list[str]:
    """Return a prompt for each line of a file; an empty line is an empty prompt.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read, or is empty.
        DataError: The file is not UTF-8.
    """
    text = _decode(_read(path), path)
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise ConfigError(f"`{path}` is empty", hint="write one prompt on each line")
    return [line.removesuffix("\r") for line in lines]


def read_json_schema(path: str) -> dict[str, Any] | bool:
    """Return the JSON schema in a file.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read.
        DataError: The file is not JSON, or is no schema.
    """
    try:
        schema = json.loads(_decode(_read(path), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    if not isinstance(schema, dict | bool):
        raise DataError(f"`{path}` is no JSON schema", why="a schema is an object")
    return schema


def read_stdin() -> str:
    """Return standard input as one prompt, without the line break at its end."""
    return _one_prompt(sys.stdin.buffer.read(), "standard input")


def _one_prompt(content: bytes, name: str) -> str:
    # Editors and `echo` add it; with it, the model would start a new line.
    return _decode(content, name).removesuffix("\n").removesuffix("\r")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompt file `{path}`", why=error.strerror or str(error)
        ) from None


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"`{name}` line {line} is not UTF-8",
            why=f"byte {error.start} is 0x{content[error.start]:02x}",
            hint="convert it, for example with `iconv`",
        ) from None
