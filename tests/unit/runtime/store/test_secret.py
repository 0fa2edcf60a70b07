"""The secret of a run: from the environment, a file, or the user's own, which is made."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.runtime.store.secret import new_secret, run_secret

ADDRESS = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}


def test_new_secrets_differ() -> None:
    """Each has 32 random bytes."""
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(bytes.fromhex(new_secret())) == 32


def test_the_variable_comes_first(tmp_path: Path) -> None:
    """All processes with the same variable and address agree, and no file is looked at."""
    env = {**ADDRESS, "LMCORE_SECRET": "0123456789abcdef", "HOME": str(tmp_path)}
    assert run_secret(env) == run_secret(dict(env))
    assert run_secret(env) != run_secret({**env, "MASTER_PORT": "29501"})
    assert run_secret(env) != run_secret({**env, "LMCORE_SECRET": "0123456789abcdeF"})
    assert not list(tmp_path.iterdir())


def test_the_users_secret_is_made_once(tmp_path: Path) -> None:
    """Of many processes that come at once one makes it; nobody else can read it."""
    env = {**ADDRESS, "HOME": str(tmp_path)}
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(run_secret, [env] * 32))
    assert len(found) == 1
    (file,) = tmp_path.rglob("secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    assert {run_secret(env)} == found


def test_state_directory(tmp_path: Path) -> None:
    """The user's state directory is used if it is set."""
    run_secret({**ADDRESS, "HOME": "/nonexistent", "XDG_STATE_HOME": str(tmp_path)})
    assert (tmp_path / "lmcore" / "secret").exists()


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one host meet in the temporary folder."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    first = run_secret({**ADDRESS, "HOME": "/nonexistent"})
    assert run_secret(ADDRESS) == first
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["lmcore"]


def test_a_file_that_others_read_is_refused(tmp_path: Path) -> None:
    """It may be known to them already."""
    file = tmp_path / "secret"
    file.write_text("x" * 40)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="may be read by other users"):
        run_secret({**ADDRESS, "LMCORE_SECRET_FILE": str(file)})
    file.chmod(0o600)
    assert len(run_secret({**ADDRESS, "LMCORE_SECRET_FILE": str(file)})) == 32


def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    """A file that the user names must be there: a new one would differ from other hosts'."""
    file = tmp_path / "none"
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        run_secret({**ADDRESS, "LMCORE_SECRET_FILE": str(file)})
    assert str(file) in caught.value.what
    assert "LMCORE_SECRET" in (caught.value.hint or "")
    assert not file.exists()


@pytest.mark.parametrize("secret", ["short", "x" * 15])
def test_a_short_secret_is_refused(secret: str) -> None:
    """It could be guessed."""
    with pytest.raises(ConfigError, match=f"has {len(secret)} bytes"):
        run_secret({**ADDRESS, "LMCORE_SECRET": secret})
