"""Secret of a run: known to its processes, and to nobody else who can reach its port."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, counted

__all__ = ["SECRET", "SECRET_FILE", "local_run_env", "new_secret", "run_secret"]

SECRET = "LMCORE_SECRET"
"""Environment variable with the secret itself, as a job's environment passes it on."""
SECRET_FILE = "LMCORE_SECRET_FILE"
"""Environment variable with the path of a file that has the secret, of mode 0600."""

_LEAST_BYTES, _MOST_BYTES = 16, 4096


def new_secret() -> str:
    """Return a new random secret, as text for an environment variable."""
    return secrets.token_hex(32)


def local_run_env() -> dict[str, str]:
    """Return a free address of this host and a new secret, as variables of a run's processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), SECRET: new_secret()}


def run_secret(env: Mapping[str, str]) -> bytes:
    """Return the secret of this process's run, if no launcher of lmcore passed one on.

    It is derived from the variable `LMCORE_SECRET`, else from the file that `LMCORE_SECRET_FILE`
    names, else from a file of the user, which is made if it is missing: its directory is usually
    shared by the hosts of a cluster.  The address of the run enters, so that two runs of a user
    differ.

    Args:
        env: Environment of the process.

    Raises:
        ConfigError: The secret is too short, or its file cannot be used.
    """
    given = env.get(SECRET, "")
    if given:
        source, content = f"`{SECRET}`", given.encode()
    else:
        path = Path(env.get(SECRET_FILE, "") or _user_file(env))
        source, content = f"`{path}`", _read(path, make=not env.get(SECRET_FILE))
    if len(content) < _LEAST_BYTES:
        raise ConfigError(
            f"the secret in {source} has {counted(len(content), 'byte')}",
            why=f"the processes of a run recognize each other by it; {_LEAST_BYTES} bytes at least",
            hint=f"make one with `openssl rand -hex 32`, or leave `{SECRET}` unset",
        )
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    run = "\0".join(env.get(name, "") for name in names)
    return hmac.digest(content, run.encode(), hashlib.sha256)


def _user_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's secret: in the home directory, else a temporary one."""
    state = env.get("XDG_STATE_HOME", "")
    home = env.get("HOME", "")
    if Path(state).is_absolute():
        return Path(state, "lmcore", "secret")
    if Path(home).is_absolute() and os.access(home, os.W_OK):
        return Path(home, ".local", "state", "lmcore", "secret")
    return Path(tempfile.gettempdir(), f"lmcore-{os.getuid()}", "secret")


def _read(path: Path, *, make: bool) -> bytes:
    """Return the content of a secret's file, without white space around it.

    Raises:
        ConfigError: It cannot be read or made, or others can read it.
    """
    try:
        if make:
            _make(path)
        status = path.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"`{path}` may be read by other users",
                why="the processes of a run recognize each other by the secret in it",
                hint=f"`chmod 600 {path}`, or remove it, if it may have been read",
            )
        return read_bounded_file(path, _MOST_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"the secret of the run cannot be read from `{path}`",
            why=error.strerror or str(error),
            hint=f"set `{SECRET}` to the same 16 bytes or more for all processes of the run, or "
            f"`{SECRET_FILE}` to a file of mode 0600",
        ) from None


def _make(path: Path) -> None:
    """Write a new secret to *path* unless there is one; of several processes the first wins."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise PermissionError(13, f"the directory `{path.parent}` is another user's")
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # of mode 0600
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(new_secret() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()
