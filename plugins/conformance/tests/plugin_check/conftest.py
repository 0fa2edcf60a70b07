"""Plugins that are installed for one test, and the check of them."""

from __future__ import annotations

import json
import textwrap

import pytest

from lmcore_conformance.plugin_check import command

HEAD = """
import ctypes, os, sys, time
from pathlib import Path
from lmcore.contract import *
from lmcore.hookspecs import hookimpl
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a plugin `guest` of these pieces of source."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("LMCORE_PLUGINS", "LMCORE_PLUGIN_OFF", "LMCORE_DEVICE"):
        monkeypatch.delenv(name, raising=False)

    def write(*pieces, group="lmcore.plugins", name="guest", distribution="lmcore-guest"):
        text = "".join(textwrap.dedent(piece) for piece in (HEAD, *pieces))
        (tmp_path / "guest_plugin.py").write_text(text, encoding="utf-8")
        info = tmp_path / f"{distribution.replace('-', '_')}-0.9.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.9\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = f"[{group}]\n{name} = guest_plugin\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")

    return write


@pytest.fixture
def empty_torch(tmp_path):
    """A torch that is imported at once, for plugins that are not to import it."""
    (tmp_path / "torch").mkdir()
    for module in ("__init__", "nn"):
        (tmp_path / "torch" / f"{module}.py").touch()


@pytest.fixture
def check(capsys):
    """Return a function that runs the command and returns its status and its JSON."""

    def run(*arguments):
        status = command.run([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run
