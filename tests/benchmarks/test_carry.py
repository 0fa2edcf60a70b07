"""The folder that is taken to a machine without internet: what is fetched, what is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def write_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel with one module and such requirements."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {one}" for one in needs]
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": "\n".join([*metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


@pytest.fixture
def carried(tmp_path) -> Path:
    """A folder with a plugin, what it needs that is nowhere, and what it needs that is here."""
    folder = tmp_path / "carry"
    folder.mkdir()
    needs = ("lmcore>=2026", "torch>=2.11", "packaging>=20", "absent-thing<3; python_version > '3'")
    write_wheel(folder, "lmcore_toy", "1.0", *needs, "extra-thing; extra == 'more'")
    write_wheel(folder, "absent_thing", "2.0")
    write_wheel(folder, "packaging", "20.0")
    return folder


def test_what_is_fetched(importable, carried):
    """All that the wheels need without extras, but for torch, lmcore and what is there already."""
    import carry

    asked = carry.downloads(carried, "3.12")
    assert "--python-version=3.12" in asked
    assert f"--dest={carried}" in asked
    names = [word for word in asked if not word.startswith(("-", "/"))]
    assert sorted(names) == sorted(carry.MORE)


def test_what_is_missing_is_fetched(importable, carried):
    """A requirement without a wheel is asked for as it is written."""
    import carry

    (carried / "absent_thing-2.0-py3-none-any.whl").unlink()
    assert 'absent-thing<3; python_version > "3"' in carry.downloads(carried, "3.12")


@pytest.mark.full
def test_what_is_installed(carried, tmp_path):
    """Ours, and of the others what is not here: what the machine has is left alone."""
    target = tmp_path / "site"
    command = [sys.executable, BENCHMARKS / "carry.py", "install", carried, target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["absent-thing 2.0: installed", "lmcore-toy 1.0: installed"]
    assert lines[2].startswith("packaging 20.0: ")
    assert lines[2].endswith(" is here")
    assert (target / "lmcore_toy.py").exists()
    assert (target / "absent_thing.py").exists()
    assert not (target / "packaging.py").exists()
