"""The plugin adds exactly the commands that the core lists as its own."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import pytest

from lmcore.cli.commands import known_commands
from lmcore.cli.main import main
from lmcore.contract.registry import CommandRegistry
from lmcore_serve.plugin import lmcore_add_commands, lmcore_plugin_info

PACKAGE = "lmcore-serve"
HELP = """
import sys
from lmcore.cli.main import main
status = main(sys.argv[1:])
print("loaded:", *({"torch", "numpy", "fastapi", "uvicorn"} & {*sys.modules}), file=sys.stderr)
sys.exit(status)
"""


def test_the_core_knows_the_commands() -> None:
    """Names and summaries are the same, so that `lmcore --help` is, whether it is installed."""
    registry = CommandRegistry(PACKAGE)
    lmcore_add_commands(registry)
    known = {one.name: one.summary for one in known_commands().values() if one.package == PACKAGE}
    assert {name: one.summary for name, one in registry.found.items()} == known
    assert list(known) == ["serve", "ask"]
    assert lmcore_plugin_info().name == "serve"


@pytest.mark.parametrize("command", ["serve", "ask"])
def test_without_the_package(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the package and the command that installs it; the help lists the command."""
    found = importlib.metadata.entry_points(group="lmcore.plugins")
    others = tuple(one for one in found if one.name != "serve")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: others)
    monkeypatch.setattr("lmcore.model.installation.sources", lambda: None)
    for name in ("LMCORE_PLUGINS", "LMCORE_PLUGIN_OFF"):
        monkeypatch.delenv(name, raising=False)
    assert main([command, "--anything"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: `lmcore {command}` is not available\n")
    assert f"why: the package `{PACKAGE}`, which adds it, is not installed\n" in said
    assert 'hint: run `pip install "lmcore[serve]"`, with the index or folder' in said
    monkeypatch.setenv("COLUMNS", "120")
    assert main([]) == 0
    (line,) = re.findall(rf"^  {command} .*$", capsys.readouterr().out, re.MULTILINE)
    assert line.endswith(" (needs lmcore[serve])")


@pytest.mark.parametrize("command", ["serve", "ask"])
def test_a_plugin_that_is_off(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what leaves it out, not that it should be installed."""
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert "is off: `LMCORE_PLUGINS` leaves it out" in said
    assert "pip install" not in said


@pytest.mark.parametrize("argv", [["serve", "--help"], ["ask", "--help"], ["--help"]], ids=" ".join)
def test_help_is_instant(argv: list[str]) -> None:
    """The commands explain themselves without torch and without the packages of the server."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, *argv], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "loaded:"
