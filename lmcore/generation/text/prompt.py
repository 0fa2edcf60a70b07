"""Prompts and schemas from the command line, a file or standard input; torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, DataError
from lmcore.base.missing_path import missing_path_hint
from lmcore.data.tokenizer import special_ids

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = [
    "encode_prompt",
    "no_source_without_cache",
    "read_json_schema",
    "read_lines",
    "read_prompt_file",
    "read_prompt_lines",
    "read_stdin",
    "source_and_prompt",
]

_PROMPT = "the prompt file `{}`"
_SCHEMA = "the file `{}` of `--json-schema`"


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ConfigError: The text has bytes that are not UTF-8, or nothing that the tokenizer encodes.
    """
    try:
        return tokenizer.encode(text)
    except UnicodeEncodeError:
        raise ConfigError(
            "the prompt is not UTF-8", hint="give it by `--prompt-file`, in UTF-8"
        ) from None
    except DataError as error:
        raise ConfigError(error.what, why=error.why, hint=error.hint) from None


def source_and_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the input of an encoder for some tokens, and the first token of the decoder.

    The input ends with the token that ends a text, which a `tokenizer.json` of T5 has added before.
    The decoder begins as in training: with the token that begins a text, or in its place the
    padding.

    Raises:
        ConfigError: The tokenizer has no token that ends a text.
    """
    special = special_ids(tokenizer)
    end = special.eos if special.eos is not None else special.sep
    if end is None:
        raise ConfigError(
            f"the tokenizer `{tokenizer.name}` cannot make the input of an encoder",
            why="its vocabulary has no token that ends a text",
            hint="give the tokenizer that the model was trained with",
        )
    begin = special.bos if special.bos is not None else special.pad or 0
    source = [*ids]
    if source[-1:] != [end]:
        source.append(end)
    return source, [begin]


def no_source_without_cache() -> ConfigError:
    """Return the error of generation without a cache by a model with an encoder."""
    return ConfigError(
        "`--no-cache` is not supported by models with an encoder",
        why="the encoder's output is kept in the cache",
        hint="leave it out",
    )


def read_prompt_file(path: str) -> str:
    """Return a file's text as one prompt, without the line break at its end.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    return _one_prompt(_read(path, _PROMPT), f"`{path}`")


def read_prompt_lines(path: str) -> list[str]:
    """Return a prompt for each line of a file; an empty line is an empty prompt.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, or is empty.
    """
    lines = read_lines(path, _PROMPT)
    if not lines:
        raise ConfigError(f"`{path}` is empty", hint="write one prompt on each line")
    return lines


def read_lines(path: str, name: str = _PROMPT) -> list[str]:
    """Return the lines of a file.

    Args:
        path: Path of the file.
        name: Name of the file in messages, with `{}` for the path.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    text = _decode(_read(path, name), f"`{path}`")
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def read_json_schema(path: str) -> dict[str, Any] | bool:
    """Return the JSON schema in a file.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or is not a schema.
    """
    name = _SCHEMA.format(path)
    try:
        schema = json.loads(_decode(_read(path, _SCHEMA), name))
    except (ValueError, RecursionError) as error:  # `ValueError`: numbers of too many digits too
        raise ConfigError(f"{name} is not JSON", why=str(error)) from None
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"{name} is not a JSON schema", why="a schema is an object")
    return schema


def read_stdin() -> str:
    """Return standard input as one prompt, without the line break at its end.

    Raises:
        ConfigError: It is not UTF-8.
    """
    return _one_prompt(sys.stdin.buffer.read(), "standard input")


def _one_prompt(content: bytes, name: str) -> str:
    # Editors and `echo` add it; with it, the model would start a new line.
    return _decode(content, name).removesuffix("\n").removesuffix("\r")


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {name.format(path)}",
            why=error.strerror or str(error),
            hint=missing_path_hint(path),
        ) from None


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{name} line {line} is not UTF-8",
            why=f"byte {error.start} is 0x{content[error.start]:02x}",
            hint="convert it, for example with `iconv`",
        ) from None
