"""`lmcore plugin` without the authors' kit: it says what brings its commands."""

from __future__ import annotations

import dataclasses

import pytest

from lmcore.cli.main import main
from lmcore.cli.plugin import group, plugin_commands
from lmcore.plugin import PluginSet, PluginState, discover


@pytest.fixture
def installed(monkeypatch):
    """Return a function that leaves only these plugins installed."""

    def leave(*records) -> None:
        plugins = PluginSet(tuple(records))
        for module in (plugin_commands, group):
            monkeypatch.setattr(module, "discover", lambda **_: plugins)

    return leave


def cpu():
    """Return the record of the CPU's plugin."""
    return next(one for one in discover(env={"LMCORE_PLUGINS": ""}) if one.name == "cpu")


def test_a_missing_kit_is_named(installed, capsys):
    """The message says which package has the command, and how to get it."""
    installed(cpu())
    assert main(["plugin", "check", "lmcore-mychip"]) == 2
    err = capsys.readouterr().err
    assert "error: `lmcore plugin check` is not available" in err
    assert "why: the package `lmcore-conformance`, which adds it, is not installed" in err
    assert "`pip install ./plugins/conformance`" in err


def test_a_kit_that_cannot_be_used_says_why(installed, capsys):
    """It is installed, so that installing it is no advice."""
    kit = dataclasses.replace(
        cpu(),
        name="conformance",
        distribution="lmcore-conformance",
        state=PluginState.OFF,
        reason="`--plugin-off` leaves it out",
        hooks=None,
    )
    installed(cpu(), kit)
    assert main(["plugin", "new", "mychip"]) == 2
    err = capsys.readouterr().err
    assert "which adds it, is off: `--plugin-off` leaves it out" in err
    assert "pip install" not in err


def test_help_says_where_the_commands_are_from(installed, capsys):
    """Without the kit no command is listed."""
    installed(cpu())
    assert main(["plugin"]) == 0
    out = capsys.readouterr().out
    assert "usage: lmcore plugin COMMAND" in out
    assert "lmcore-conformance adds the commands" in out
    assert "  check" not in out
