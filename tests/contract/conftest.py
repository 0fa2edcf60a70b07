"""An environment of its own for tests that install plugins as a user does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest


class Environment:
    """An environment, and lmcore's command in it."""

    def __init__(self, home: Path) -> None:
        """Make it; it has this environment's packages, and those that `install` adds."""
        venv.create(home, with_pip=False)
        self.python = home / "bin" / "python"
        mine = [*site.getsitepackages(), sysconfig.get_path("purelib")]
        packages = next((home / "lib").glob("python*")) / "site-packages"
        lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(mine)]
        (packages / "zz_outer.pth").write_text("\n".join(lines) + "\n")
        self.work = home / "work"
        self.work.mkdir()

    def see(self, package: str, distribution: str = "") -> None:
        """Let it import a package that this process can, alone, with its entry points if named."""
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folders = [Path(spec.origin).parent]
        if distribution:
            record = importlib.metadata.distribution(distribution).locate_file("")
            wanted = f"{distribution.replace('-', '_')}-*.dist-info"
            folders += Path(str(record)).glob(wanted)
        packages = next((self.python.parents[1] / "lib").glob("python*")) / "site-packages"
        for folder in folders:
            (packages / folder.name).symlink_to(folder)

    def install(self, wheel: Path) -> None:
        """Install a wheel as a user does, from the file alone."""
        self._pip("--no-index", str(wheel))

    def install_source(self, folder: Path) -> None:
        """Install a distribution from its folder, built by what is here if it is here."""
        here = importlib.util.find_spec("setuptools") is not None
        self._pip(*(["--no-index", "--no-build-isolation"] if here else []), str(folder))

    def _pip(self, *words: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        # Pins for what a build installs are refused where it is to install nothing.
        env = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_CONSTRAINT"}
        subprocess.run([*pip, "--no-deps", *words], check=True, timeout=120, env=env)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `lmcore WORDS`."""
        return self.module("lmcore.cli.main", *words, **env)

    def module(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m WORDS`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LMCORE_", "GOODCHIP")) and name != "PYTHONPATH"
        }
        return subprocess.run(
            [str(self.python), "-P", "-m", *words],
            cwd=self.work,
            env={**inherited, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def plugins(self, **env: str) -> dict[str, dict]:
        """Return what `lmcore plugins --json` says of each plugin, by name."""
        found = self.run("plugins", "--json", **env)
        assert found.returncode == 0, found.stderr
        return {one["name"]: one for one in json.loads(found.stdout)["plugins"]}


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    """What makes an environment that has this one's packages and nothing else."""
    return lambda: Environment(tmp_path_factory.mktemp("environment"))
