"""Commands of packages of lmcore's that are not installed: how they are listed and refused."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lmcore.cli import commands, plugin_commands
from lmcore.cli.main import main
from lmcore.model.command import Command
from lmcore.plugin import PluginSet, PluginState, discover

DIG = Command("dig", "Dig a hole.", package="lmcore-digging", extra="dig")


@pytest.fixture
def installed(monkeypatch):
    """Return a function that leaves only these plugins installed."""

    def leave(*records) -> None:
        plugins = PluginSet(tuple(records))
        monkeypatch.setattr(plugin_commands, "discover", lambda **_: plugins)

    return leave


@pytest.fixture
def table(monkeypatch):
    """Adds `dig` of a package to the commands of one word."""
    table = {**commands.COMMANDS, "holes": (DIG,)}
    for module in (commands, plugin_commands):
        monkeypatch.setattr(module, "COMMANDS", table)


def cpu():
    """Return the record of the CPU's plugin."""
    return next(one for one in discover(env={"LMCORE_PLUGINS": ""}) if one.name == "cpu")


@pytest.mark.parametrize(
    "words, command, package, wanted",
    [
        (["plugin", "check", "x"], "plugin check", "lmcore-conformance", "lmcore-conformance"),
        (["dig", "--deep"], "dig", "lmcore-digging", '"lmcore[dig]"'),
        (["help", "dig"], "dig", "lmcore-digging", '"lmcore[dig]"'),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_missing_package_is_named(
    installed, capsys, monkeypatch, words, command, package, wanted
):
    """The message says which package has the command, and how to get it."""
    monkeypatch.setattr("lmcore.model.installation.sources", lambda: None)
    installed(cpu())
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"error: `lmcore {command}` is not available\n"
        f"why: the package `{package}`, which adds it, is not installed\n\n"
        f"hint: run `pip install {wanted}`, with the index or folder that lmcore came from\n"
    )


def test_a_package_that_cannot_be_used_says_why(installed, capsys):
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


@pytest.mark.usefixtures("table")
def test_help_says_what_to_install(installed, capsys, monkeypatch):
    """A command of a package that is not installed is listed with what brings it."""
    monkeypatch.setenv("COLUMNS", "100")
    installed(cpu())
    assert main(["--help"]) == 0
    assert "\nholes:\n  dig         Dig a hole. (needs lmcore[dig])\n" in capsys.readouterr().out
    assert main(["plugin"]) == 0
    out = capsys.readouterr().out
    assert "usage: lmcore plugin COMMAND" in out
    assert "with its cause. (needs lmcore-conformance)\n" in re.sub(r"\n {14}", " ", out)


@pytest.mark.usefixtures("table")
def test_a_package_that_is_there_is_listed_where_it_belongs(monkeypatch, capsys):
    """The plugin's command takes the place in the table, not a list of the plugin's."""
    record = cpu()

    def add(_plugins, *_):
        one = Command("dig", "Dig deeper.", "builtins:len")
        return plugin_commands.Registrations({"dig": one}, {"dig": record})

    monkeypatch.setattr(plugin_commands, "plugin_commands", add)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "\nholes:\n  dig         Dig deeper.\n" in out
    assert "plugin cpu:" not in out
    assert main(["dig", "a", "b"]) == 2
