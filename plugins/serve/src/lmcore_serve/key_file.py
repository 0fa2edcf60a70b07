"""Files of API keys, one on each line; a line that begins with `#` is a comment."""

from __future__ import annotations

import logging
from pathlib import Path

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError
from lmcore.base.missing_path import missing_path_hint

__all__ = ["read_keys"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_MAX_BYTES = 2**20


def read_keys(path: str) -> list[str]:
    """Return the keys in a file, at least one; warn if other users can read it.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: It cannot be read, is not ASCII, or has no keys.
    """
    try:
        if Path(path).stat().st_mode & 0o077:
            logger.warning("other users can read the keys in `%s`: `chmod 600 %s`", path, path)
        text = read_bounded_file(path, _MAX_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=missing_path_hint(path),
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"`{path}` has characters that are not ASCII", why="an HTTP header has only these"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"`{path}` has no keys", hint="write one key on each line")
    return keys
