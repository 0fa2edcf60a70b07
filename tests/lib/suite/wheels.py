"""The wheels of this tree, built once and installed in the environment of `py`.

    wheels.py install [NAME==VERSION ...]
                                   build what is stale into dist/, install it in this environment,
                                   with these versions in place of the pins
    wheels.py ensure WORK_DIR      the same for the environment of `py` under WORK_DIR, with tox
    wheels.py accelerators FOLDER  put the simulated device and the authors' kit into FOLDER
    wheels.py packages FOLDER NAME ...  put packages from the index, and of ours from dist/, into
                                   FOLDER, without what they need

What is stale is decided by a fingerprint of the sources, so that the environments that work in `py`
cost nothing if it is up to date.  The variable TORCH_INDEX_URL names an index for torch alone; all
else comes from pip's own.  The standard library suffices to run this.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[3]
DIST = ROOT / "dist"
PLUGINS = (
    *("plugins/conformance", "plugins/data-tools", "plugins/deepspeed", "plugins/serve"),
    *("plugins/xla", "plugins_cuda", "plugins_xpu"),
)
SOURCES = (
    *("CMakeLists.txt", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"),
    *("lmcore", "native", "plugins", "plugins_cuda", "plugins_xpu"),
)
LEFT_BY_BUILDS = ("__pycache__", "build", "*.egg-info", "*.pyc", "*.so")
COMPILERS = ("c++", "g++", "clang++")
STAMP = "lmcore-wheels.txt"


def files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield the source files under some paths of the tree, sorted."""
    for path in sorted(paths):
        found = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*")
        for file in sorted(found):
            parts = file.relative_to(ROOT).parts
            left = any(Path(part).match(pattern) for part in parts for pattern in LEFT_BY_BUILDS)
            if file.is_file() and not left and not is_test(parts):
                yield file


def is_test(parts: tuple[str, ...]) -> bool:
    """Return whether a path is one of a plugin's own tests, which no wheel has."""
    own = parts[1:] if parts[0] == "plugins" else parts
    return parts[0].startswith("plugins") and own[1:2] == ("tests",)


def fingerprint(paths: Iterable[str] = SOURCES) -> str:
    """Return a digest of the sources, and of the Python that they are built for."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for file in files(paths):
        digest.update(f"{file.relative_to(ROOT)}\0".encode())
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def is_current(stamp: Path, wanted: str) -> bool:
    """Return whether a stamp was left for these sources."""
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted


def build() -> None:
    """Build the wheels of all distributions and lmcore's sdist into dist/, unless they are there.

    lmcore's wheel is built from the sdist; the plugins' from copies without what earlier builds
    have left, which would get into them.  The packages that build are this environment's.
    """
    wanted = fingerprint()
    if is_current(DIST / STAMP, wanted):
        return
    shutil.rmtree(DIST, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST)]
    run([*command, str(ROOT)])
    with tempfile.TemporaryDirectory() as folder:
        for plugin in PLUGINS:
            run([*command, "--wheel", str(copied(plugin, Path(folder)))])
    if any(map(shutil.which, COMPILERS)) and not has_native(*wheels("lmcore")):
        sys.exit("error: lmcore's wheel has no C++ part, and there is a compiler: see CMake above")
    (DIST / STAMP).write_text(wanted, encoding="utf-8")


def has_native(wheel: str) -> bool:
    """Return whether a wheel has both of lmcore's C++ modules; tests are skipped without them."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = ("lmcore/_native.", "lmcore_cpu/_kernels.")
    return all(any(name.startswith(module) for name in names) for module in modules)


def copied(plugin: str, folder: Path) -> Path:
    """Copy a distribution without what builds leave, and return the copy."""
    copy = folder / Path(plugin).name
    shutil.copytree(ROOT / plugin, copy, ignore=shutil.ignore_patterns(*LEFT_BY_BUILDS))
    return copy


def install(*others: str) -> None:
    """Install lmcore with what it needs, the plugins of GPUs and the applications here.

    Args:
        others: Requirements such as `torch==2.8.0` that replace the pins of constraints.txt.
    """
    stamp = Path(sys.prefix) / STAMP
    wanted = fingerprint()
    if is_current(stamp, wanted) and is_current(DIST / STAMP, wanted):
        return
    stamp.unlink(missing_ok=True)
    if others:
        os.environ["PIP_CONSTRAINT"] = str(unpinned(others))
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, *rest = needed_commands(pip, [*project["dependencies"], *others])
    # torch is unpacked on one core while the compiler has the other.
    with subprocess.Popen(first, cwd=ROOT) as installing:
        build()
    if installing.returncode:
        fail(first, installing.returncode)
    for command in rest:
        run(command)
    own = wheels(
        *("lmcore", "lmcore_cuda", "lmcore_data_tools", "lmcore_serve", "lmcore_xla", "lmcore_xpu")
    )
    run([*pip, "--no-deps", "--force-reinstall", *own])
    run([sys.executable, "-m", "pip", "check"])  # that the list above was all that the wheels need
    stamp.write_text(wanted, encoding="utf-8")


def needed_commands(pip: list[str], requirements: list[str]) -> list[list[str]]:
    """Return the commands that install requirements: torch alone first, if it has its own index."""
    index = os.environ.get("TORCH_INDEX_URL")
    everything = [*pip, *requirements]
    if not index:
        return [everything]
    torch = [one for one in requirements if re.match(r"torch\b", one)]
    return [[*pip, "--no-deps", "--index-url", index, *torch], everything]


def unpinned(others: Iterable[str]) -> Path:
    """Write the constraints without some packages and Triton, and return the path.

    Each torch needs its own Triton.
    """
    free = {"triton", *(other.partition("==")[0] for other in others)}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    path = Path(sys.prefix) / "constraints.txt"
    kept = (line for line in lines if line.partition("==")[0].strip() not in free)
    path.write_text("".join(kept), encoding="utf-8")
    return path


def wheels(*names: str) -> list[str]:
    """Return the paths of wheels in dist/."""
    return [str(path) for name in names for path in DIST.glob(f"{name}-*.whl")]


def ensure(work_dir: Path) -> None:
    """Have tox make the environment of `py`, unless it is up to date."""
    wanted = fingerprint()
    if all(is_current(folder / STAMP, wanted) for folder in (DIST, work_dir / "py")):
        return
    constraints = str(ROOT / "constraints.txt")
    run([sys.executable, "-m", "pip", "install", "--quiet", "-c", constraints, "tox"])
    tox = [sys.executable, "-m", "tox", "run", "--conf", str(ROOT / "tox.ini")]
    nothing = "testenv:py.commands=python --version"
    run([*tox, "--workdir", str(work_dir), "-e", "py", "-q", "--override", nothing])


def accelerators(folder: Path) -> None:
    """Install the simulated device and the authors' kit in a folder for PYTHONPATH.

    The device's library is built against the torch of this environment.
    """
    wanted = fingerprint(["plugins/sim", "plugins/conformance", "constraints.txt"])
    if is_current(folder / STAMP, wanted):
        return
    shutil.rmtree(folder, ignore_errors=True)
    # Pins for what a build installs are refused where it is to install nothing.
    env = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_CONSTRAINT"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as copies:
        sim = copied("plugins/sim", Path(copies))
        run([*pip, "--target", str(folder), str(sim), *wheels("lmcore_conformance")], env)
    (folder / STAMP).write_text(wanted, encoding="utf-8")


def packages(folder: Path, *names: str) -> None:
    """Install packages, ours from dist/, without those they need, in a folder for PYTHONPATH."""
    own = [f"plugins/{name.removeprefix('lmcore-')}" for name in names if is_ours(name)]
    wanted = f"{fingerprint(['constraints.txt', *own])} {' '.join(names)}"
    if is_current(folder / STAMP, wanted):
        return
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run([*pip, "--target", str(folder), *map(source_of, names)])
    (folder / STAMP).write_text(wanted, encoding="utf-8")


def source_of(name: str) -> str:
    """Return what pip is given for a package: the path of our wheel, or the name."""
    if not is_ours(name):
        return name
    found = wheels(name.replace("-", "_"))
    if not found:
        sys.exit(f"error: dist/ has no wheel of {name}")
    return found[0]


def is_ours(name: str) -> bool:
    """Return whether a package is built here."""
    return name.startswith("lmcore-")


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Run a command; its failure ends this program with its status."""
    status = subprocess.run(command, env=env, check=False, cwd=ROOT).returncode
    if status:
        fail(command, status)


def fail(command: list[str], status: int) -> NoReturn:
    """End with the status of a command that failed."""
    print(f"error: `{' '.join(command)}` ended with status {status}", file=sys.stderr)
    sys.exit(status)


def main(command: str, *arguments: str) -> None:
    """Do what is asked."""
    if command == "install":
        install(*arguments)
    elif command == "ensure":
        ensure(Path(arguments[0]))
    elif command == "accelerators":
        accelerators(Path(arguments[0]))
    elif command == "packages":
        packages(Path(arguments[0]), *arguments[1:])
    else:
        sys.exit(f"error: unknown command `{command}`\n{__doc__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
