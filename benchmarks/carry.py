"""All that a machine without internet lacks to run `gpu.py` or `xpu.py`, in one folder.

The folder is made where a package index can be reached, travels with the repository, and is
installed on the other machine, which has its own torch:

    python benchmarks/carry.py make .carry --plugin plugins_cuda --python 3.12
    python benchmarks/carry.py install .carry /tmp/site
    PYTHONPATH=/tmp/site PYTHONSAFEPATH=1 python benchmarks/gpu.py

It has wheels of lmcore, of the plugin and of the conformance suite, and of what those need, but for
torch.  Of the latter only what is missing there, or too old, is installed: what the machine's other
packages count on stays.  `PYTHONSAFEPATH` keeps Python from taking lmcore from the current folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ImportError:  # where it is to be installed pip has its own
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
THEIRS = ("torch", "lmcore")
MORE = ("Pygments", "iniconfig", "markdown-it-py", "mdurl", "protobuf", "pytest-timeout")
"""Packages that the needed ones need: rich, pytest and tensorboardX, and the tests' timeouts."""
PLATFORMS = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
"""Versions of glibc that wheels are marked with; pip takes these words as they are."""


def main() -> None:
    """Make the folder, or install it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="build and fetch the wheels; needs a package index")
    make.add_argument("folder", type=Path)
    make.add_argument("--plugin", default="plugins_cuda", help="folder of the device's plugin")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    make.add_argument("--python", default=own, help="version there; lmcore's C++ is built for it")
    there = commands.add_parser("install", help="install what is missing here, without an index")
    there.add_argument("folder", type=Path)
    there.add_argument("target", type=Path)
    asked = parser.parse_args()
    if asked.command == "install":
        install(asked.folder, asked.target)
    else:
        collect(asked.folder, asked.plugin, asked.python)


def collect(folder: Path, plugin: str, python: str) -> None:
    """Build our wheels and fetch the wheels that they need."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in (".", plugin, "plugins/conformance"):
        build(ROOT / source, folder, python if source == "." else "")
    command = [sys.executable, "-m", "pip", "download", *downloads(folder, python)]
    subprocess.run(command, check=True)
    size = sum(one.stat().st_size for one in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} wheels, {size / 2**20:.1f} MiB in {folder}")


def downloads(folder: Path, python: str) -> list[str]:
    """Return the arguments of `pip download` for what the wheels in a folder need."""
    wanted = {canonicalize_name(one.name): str(one) for one in needs(folder)}
    wanted |= {canonicalize_name(name): name for name in MORE}
    own = {parse_wheel_filename(one.name)[0] for one in folder.glob("*.whl")}
    names = [text for name, text in wanted.items() if name not in own | set(THEIRS)]
    platforms = [f"--platform=manylinux_{one}_x86_64" for one in PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    flags += [f"--python-version={python}", "--constraint", str(ROOT / "constraints.txt")]
    return [*flags, *platforms, f"--dest={folder}", *names]


def build(source: Path, folder: Path, python: str) -> None:
    """Build a wheel from a copy of its source: what a build leaves behind stays out of it.

    Args:
        source: The distribution's folder.
        folder: Folder for the wheel.
        python: Version of the Python that its C++ is for; empty where it has none.
    """
    program = shutil.which(f"python{python}") if python else sys.executable
    if program is None:
        sys.exit(f"no `python{python}` is here, which lmcore's C++ is built with: put it on PATH")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.so", "*.egg-info", "tests")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "source"
        shutil.copytree(source, copy, ignore=unwanted)
        command = [program, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*command, "--wheel-dir", str(folder), str(copy)], check=True)


def needs(folder: Path) -> Iterator[Requirement]:
    """Yield what the wheels in a folder require, without their extras."""
    for wheel in sorted(folder.glob("*.whl")):
        for text in metadata_of(wheel).get_all("Requires-Dist", []):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def metadata_of(wheel: Path) -> importlib.metadata.PackageMetadata:
    """Return the metadata of a wheel that is not installed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)
        )
        return Parser().parsestr(archive.read(name).decode())  # type: ignore[return-value]


def install(folder: Path, target: Path) -> None:
    """Install ours, and of the others what is not here in a version that ours can use."""
    wanted = list(needs(folder))
    chosen: list[Path] = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        here = installed(name)
        asked = [one.specifier for one in wanted if canonicalize_name(one.name) == name]
        fits = here is not None and all(one.contains(here, prereleases=True) for one in asked)
        if name.startswith("lmcore") or not fits:
            chosen.append(wheel)
        print(f"{name} {version}: {'installed' if wheel in chosen else f'{here} is here'}")
    pip(["--target", str(target), "--upgrade", *map(str, chosen)])


def installed(name: str) -> str | None:
    """Return the version of a distribution that is here."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(arguments: Sequence[str]) -> None:
    """Install with pip, from files alone."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    main()
