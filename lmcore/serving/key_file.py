"""Files of API keys, one on each line; a line that begins with `#` is a comment."""

from __future__ import annotations

from lmcore.bounded_file import read_bounded_file
from lmcore.errors import ConfigError

__all__ = ["read_keys"]

_MAX_BYTES = 2**20


def read_keys(path: str) -> list[str]:
    """Return the keys in a file, at least one.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: It cannot be read, is not ASCII, or has no keys.
    """
    try:
        text = read_bounded_file(path, _MAX_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`", why=error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"`{path}` has characters that are not ASCII", why="an HTTP header has only these"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"`{path}` has no keys", hint="write one key on each line")
    return keys
