"""A separate environment for tests that install plugins as a user does."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from suite import warm
from suite.selection import SET

COMMAND = ("-m", "lmcore.cli.main")
COMMAND_WITH_FORKS = """
import sys
from suite.calls import install
install(nested=True)
from lmcore.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

SOURCES = Path(__file__).parents[2] / "contract" / "throwaway"
VERSION = "3.1.4"
"""Version of the plugins in `SOURCES`."""
HEAVY = """\
'''What takes long to load: leaves a mark where it was.'''
import os, pathlib
pathlib.Path(os.environ["HEAVY_MARK"]).touch()
"""


class Environment:
    """An environment, and lmcore's command in it.

    In the full set it is a virtual one.  In the fast set it is a folder that is searched beside
    this environment's packages, so that programs can be forked.
    """

    def __init__(self, home: Path, *, virtual: bool) -> None:
        """Create it with this environment's packages; `install` adds more."""
        self.virtual = virtual
        self.work = home / "work"
        if virtual:
            self._make_virtual(home)
        else:
            self.python = Path(sys.executable)
            self.packages = home / "site-packages"
            self.packages.mkdir()
        self.work.mkdir()

    def _make_virtual(self, home: Path) -> None:
        venv.create(home, with_pip=False)
        self.python = home / "bin" / "python"
        self.packages = next((home / "lib").glob("python*")) / "site-packages"
        folders = [*site.getsitepackages(), sysconfig.get_path("purelib")]
        lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(folders)]
        (self.packages / "zz_outer.pth").write_text("\n".join(lines) + "\n")

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
        for folder in folders:
            (self.packages / folder.name).symlink_to(folder)

    def install(self, *wheels: Path) -> None:
        """Install wheels as a user does, from the files alone."""
        self._pip("--no-index", *map(str, wheels))

    def install_source(self, *folders: Path) -> None:
        """Install distributions from their folders, built by what is here if it is here."""
        has_setuptools = importlib.util.find_spec("setuptools") is not None
        self._pip(
            *(["--no-index", "--no-build-isolation"] if has_setuptools else []), *map(str, folders)
        )

    def _pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        if self.virtual:
            pip += ["--python", str(self.python), "install"]
        else:
            pip += ["install", "--target", str(self.packages)]
        # Pins for what a build installs are refused where it is to install nothing.
        env = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_CONSTRAINT"}
        command = [*pip, "--quiet", "--no-deps", *arguments]
        subprocess.run(command, check=True, timeout=120, env=env)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `lmcore WORDS`."""
        return self.start(*COMMAND, *arguments, **env)

    def run_with_forks(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `lmcore WORDS`; if it is forked, so is what it calls in separate processes."""
        command = COMMAND if self.virtual else ("-c", COMMAND_WITH_FORKS)
        return self.start(*command, *arguments, **env)

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest; if it is forked, so is the training that it starts."""
        forks = () if self.virtual else ("-p", "suite.calls")
        return self.start("-m", "pytest", "-q", "-p", "no:cacheprovider", *forks, *arguments)

    def start(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LMCORE_", "GOODCHIP")) and name != "PYTHONPATH"
        }
        path = {} if self.virtual else {"PYTHONPATH": str(self.packages)}
        run = subprocess.run if self.virtual else warm.run
        return run(
            [str(self.python), "-P", *arguments],
            cwd=self.work,
            env={**inherited, **path, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def plugins(self, **env: str) -> dict[str, dict]:
        """Return what `lmcore plugins --json` says of each plugin, by name."""
        found = self.run("plugins", "--json", **env)
        assert found.returncode == 0, found.stderr
        return {plugin["name"]: plugin for plugin in json.loads(found.stdout)["plugins"]}


@pytest.fixture(scope="session")
def new_environment(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Environment]:
    """Function that creates an environment with this one's packages and nothing else."""
    virtual = pytestconfig.stash[SET].full
    return lambda: Environment(tmp_path_factory.mktemp("environment"), virtual=virtual)


@pytest.fixture(scope="module")
def throwaway_environment(new_environment: Callable[[], Environment]) -> Environment:
    """Environment with a good plugin, a broken one, a stale one, and one that crashes."""
    made = new_environment()
    names = ("goodchip", "broken", "stale", "crashing")
    made.install(*(build_wheel(name, made.work) for name in names))
    return made


def build_wheel(name: str, folder: Path) -> Path:
    """Write the wheel of a distribution with one plugin; return its path."""
    package, info = f"lmcore_{name}", f"lmcore_{name}-{VERSION}.dist-info"
    files = {
        f"{package}/__init__.py": "",
        f"{package}/heavy.py": HEAVY,
        f"{package}/plugin.py": (SOURCES / f"{name}.py").read_text(encoding="utf-8"),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: lmcore-{name}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[lmcore.plugins]\n{name} = {package}.plugin\n",
    }
    rows = [f"{path},sha256={digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"lmcore_{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def digest(text: str) -> str:
    """Return a file's hash as RECORD has it."""
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
