"""Benchmarks measure an installed lmcore with its C++ part, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FIND = """
import installed
print(installed.source_problem() or "installed")
"""


def package(folder: Path, *, native: bool = True) -> Path:
    """Write a stand-in for lmcore's package."""
    (folder / "lmcore/data").mkdir(parents=True)
    for name in ("lmcore", "lmcore/data"):
        (folder / name / "__init__.py").touch()
    lines = [f"available = {native}", "reason = 'it was installed without a compiler'", ""]
    (folder / "lmcore/data/native.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


def wheel(folder: Path, *, native: bool = True) -> Path:
    """Write the same as pip installs a wheel."""
    info = package(folder, native=native) / "lmcore-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcore\nVersion: 1.0\n")
    (info / "RECORD").write_text("lmcore/__init__.py,,\n")
    return folder


def checking(*, toy: bool = False, without_native: bool = False) -> str:
    """Return the code of a script that was given such flags."""
    flags = f"toy={toy}, without_native={without_native}"
    lines = ["import argparse, installed", f"installed.check(argparse.Namespace({flags}))"]
    return "\n".join([*lines, "print('measured')"])


def python(code: str, *paths: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has no other packages than those in *paths*."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, [BENCHMARKS, *paths]))}
    command = [sys.executable, "-S", "-P", "-c", code]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_wheel_is_measured(tmp_path):
    """An lmcore that pip has installed, with its C++ part, is accepted."""
    done = python(checking(), wheel(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "measured\n", "")


@pytest.mark.parametrize("place", ["PYTHONPATH", "current folder", "no distribution"])
def test_a_source_tree_is_refused(tmp_path, place):
    """A package beside the installed one is refused, however it is found: what, why, a hint."""
    source, site = package(tmp_path / "clone"), wheel(tmp_path / "site")
    paths = {"PYTHONPATH": [source, site], "current folder": [site], "no distribution": [source]}
    code = "import sys; sys.path.insert(0, '')\n" if place == "current folder" else ""
    code += checking()
    done = python(code, *paths[place], cwd=source if place == "current folder" else None)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "error: this lmcore is not an installed one, so its speed says nothing"
    assert lines[1].startswith(f"why: it is the source at {source / 'lmcore'}, ")
    assert lines[3].startswith("hint: `pip install .` in the repository")
    assert "PYTHONSAFEPATH=1" in lines[3]


def test_an_editable_installation_is_refused(tmp_path):
    """The metadata of a distribution elsewhere do not make a source tree installed."""
    source, site = package(tmp_path / "clone"), wheel(tmp_path / "site")
    for path in sorted((site / "lmcore").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (site / "lmcore").rmdir()
    done = python(FIND, site, source)
    assert done.stdout.startswith("error: this lmcore is not an installed one")


def test_no_lmcore_at_all(tmp_path):
    """The error says so if there is none."""
    done = python(FIND, tmp_path)
    assert done.stdout.startswith("error: lmcore is not installed\nwhy: this Python, ")


def test_without_native_code(tmp_path):
    """An lmcore without C++ is refused with its own reason, and measured if a flag asks for it."""
    site = wheel(tmp_path, native=False)
    done = python(checking(), site)
    assert done.returncode == 2
    assert "this lmcore has no C++ part\nwhy: it was installed without a compiler" in done.stderr
    assert "`--without-native`" in done.stderr
    asked = python(checking(without_native=True), site)
    assert (asked.returncode, asked.stdout) == (0, "measured\n")


def test_the_toy_size_takes_any_and_says_so(tmp_path):
    """With `--toy` a source tree will do, and the output begins with what it is not."""
    source = package(tmp_path, native=False)
    done = python(checking(toy=True), source)
    assert (done.returncode, done.stdout) == (0, "toy size: not a measurement\nmeasured\n")


def test_processes_that_are_started_find_the_same(importable, monkeypatch):
    """After the check a new Python does not search the current folder."""
    import installed

    monkeypatch.setenv("PYTHONSAFEPATH", "")
    installed.check(Namespace(toy=True, without_native=False))
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_toy_defaults(importable, monkeypatch):
    """`--toy` replaces defaults; what the command line says goes before them."""
    import installed

    def asked(*arguments: str) -> Namespace:
        parser = ArgumentParser()
        parser.add_argument("--turns", type=int, default=9)
        parser.add_argument("--size", type=int, default=500)
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        return installed.parse(parser, turns=1, size=2)

    assert vars(asked()) == {"turns": 9, "size": 500, "toy": False, "without_native": False}
    assert (asked("--toy").turns, asked("--toy").size) == (1, 2)
    assert (asked("--toy", "--size", "7").turns, asked("--toy", "--size", "7").size) == (1, 7)
    assert installed.shared_flags(asked("--toy", "--without-native")) == (
        "--toy",
        "--without-native",
    )


def test_figures_of_a_toy_size_are_marked(importable):
    """JSON has the note as well, of a toy size alone."""
    import installed

    found = installed.marked({"ms": 1.0}, Namespace(toy=True))
    assert json.dumps(found) == '{"note": "toy size: not a measurement", "ms": 1.0}'
    assert installed.marked({"ms": 1.0}, Namespace(toy=False)) == {"ms": 1.0}
