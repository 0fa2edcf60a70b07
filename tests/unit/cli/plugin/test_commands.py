"""Commands that plugins add: listed, run, and refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.cli.main import main

PLUGIN = """
from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("{name}", ">=1,<2")

@hookimpl
def lmcore_add_commands(registry):
    {body}
"""

TARGETS = """
import sys
from lmcore.base.errors import ConfigError, RunError

def echo(argv):
    print(*argv)
    return len(argv)

def help_(argv):
    raise SystemExit(0)

def leave(argv):
    sys.exit("gone" if argv else 5)

def refuse(argv):
    raise ConfigError("no such hole", hint="dig one")

def fail(argv):
    raise RunError("the shovel broke")

def bug(argv):
    raise ZeroDivisionError("bug")

def forget(argv):
    return None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs throw-away plugins, by name what their `lmcore_add_commands` does."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for variable in ("LMCORE_PLUGINS", "LMCORE_PLUGIN_OFF"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "digging_targets.py").write_text(TARGETS, encoding="utf-8")

    def go(**bodies: str) -> None:
        for name, body in bodies.items():
            module = f"throwaway_{name}"
            text = PLUGIN.format(name=name, body=body)
            (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
            record = tmp_path / f"lmcore_{name}-1.0.dist-info"
            record.mkdir()
            metadata = f"Metadata-Version: 2.1\nName: lmcore-{name}\nVersion: 1.0\n"
            (record / "METADATA").write_text(metadata, encoding="utf-8")
            points = f"[lmcore.plugins]\n{name} = {module}\n"
            (record / "entry_points.txt").write_text(points, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delitem(sys.modules, "digging_targets", raising=False)
        importlib.invalidate_caches()

    return go


def add(name: str, target: str, module: str = "digging_targets") -> str:
    return f'registry.add("{name}", "{module}:{target}", "Dig {name}.")'


def test_help_lists_them_by_plugin(install, capsys) -> None:
    """Below the core's commands, under a title that names the plugin."""
    install(mine=f"{add('dig-deep', 'echo')}; {add('fill-the-hole', 'echo')}")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert (
        "\nplugin mine:\n  dig-deep    Dig dig-deep.\n"
        "  fill-the-hole\n              Dig fill-the-hole.\n"
    ) in text
    assert text.index("this machine:") < text.index("plugin mine:")


def test_arguments_and_status_pass(install, capsys) -> None:
    """The function gets the arguments after its name; its status is the program's."""
    install(mine=add("dig", "echo"))
    assert main(["dig", "--deep", "3"]) == 2
    assert capsys.readouterr().out == "--deep 3\n"
    assert main(["help", "dig"]) == 1
    assert capsys.readouterr().out == "--help\n"


@pytest.mark.parametrize(
    "target, argv, status, message",
    [
        ("help_", [], 0, ""),
        ("leave", [], 5, ""),
        ("leave", ["x"], 1, "gone\n"),
        ("refuse", [], 2, "error: no such hole\n\nhint: dig one\n"),
        ("fail", [], 1, "error: the shovel broke\n"),
        (
            "forget",
            [],
            1,
            (
                "error: command `dig` of plugin `mine` (lmcore-mine 1.0) returned None\n"
                "why: a command returns its exit status\n\n"
                "hint: update or remove `lmcore-mine`, or report this to its authors\n"
            ),
        ),
    ],
)
def test_ends(install, capsys, target, argv, status, message) -> None:
    """An exit passes through, an error in words is shown so, and no status is no success."""
    install(mine=add("dig", target))
    assert main(["dig", *argv]) == status
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback(install) -> None:
    """An unexpected exception of a command is not hidden."""
    install(mine=add("dig", "bug"))
    with pytest.raises(ZeroDivisionError):
        main(["dig"])


@pytest.mark.parametrize(
    "target, module, cause",
    [
        ("echo", "digging_nowhere", "`digging_nowhere:echo` raised ModuleNotFoundError"),
        ("sing", "digging_targets", "AttributeError: module 'digging_targets' has no"),
    ],
)
def test_a_target_that_is_not_there(install, capsys, target, module, cause) -> None:
    """The error names command, plugin, version and cause; status 1."""
    install(mine=add("dig", target, module))
    assert main(["dig"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error: command `dig` of plugin `mine` (lmcore-mine 1.0) cannot be loaded\n"
    )
    assert cause in err
    assert "Traceback" not in err


def test_the_cores_names_cannot_be_taken(install, capsys) -> None:
    """The plugin's commands are left out with a warning; the core's command is the core's."""
    install(mine=f"{add('dig', 'echo')}; {add('train', 'echo')}")
    assert main(["--help"]) == 0
    shown = capsys.readouterr()
    assert "plugin mine:" not in shown.out
    assert "registers the command `train`, which is taken" in shown.err
    assert main(["config", "--help"]) == 0
    assert main(["dig"]) == 2
    err = capsys.readouterr().err
    assert "error: unknown command `dig`\nwhy: plugin `mine` might add it: it failed" in err
    install(other=add("help", "echo"))
    assert main(["--help"]) == 0
    assert "registers the command `help`, which is taken" in capsys.readouterr().err


def test_a_misspelt_command_names_the_nearest(install, capsys) -> None:
    """Suggestions know the plugins' commands."""
    install(mine=add("dig-deep", "echo"))
    assert main(["dig-dep"]) == 2
    assert "did you mean `dig-deep`?" in capsys.readouterr().err


def test_a_plugin_that_fails_harms_nobody(install, capsys) -> None:
    """One that raises is warned about, and the other's command runs."""
    install(bad="1 / 0", mine=add("dig", "echo"))
    assert main(["dig"]) == 0
    shown = capsys.readouterr()
    assert "ZeroDivisionError: division by zero" in shown.err
    assert main(["config", "show", "--json"]) == 0  # asks for no commands
    assert "ZeroDivisionError" not in capsys.readouterr().err


def test_a_plugin_that_is_off_adds_nothing(install, capsys, monkeypatch) -> None:
    """`LMCORE_PLUGINS` that leaves it out leaves its commands out."""
    install(mine=add("dig", "echo"))
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    assert main(["dig"]) == 2
    assert main(["--help"]) == 0
    assert "plugin mine" not in capsys.readouterr().out


def test_a_wrong_allow_list_does_not_spoil_the_help(install, capsys, monkeypatch) -> None:
    """The core's commands are listed, and what is wrong is said."""
    monkeypatch.setenv("LMCORE_PLUGINS", "nowhere")
    assert main(["--help"]) == 0
    shown = capsys.readouterr()
    assert "  train " in shown.out
    assert "`LMCORE_PLUGINS` names the plugin `nowhere`" in shown.err


def test_commands_of_a_group(install, capsys) -> None:
    """Two words name a command; several plugins may share a group, whose help lists all of it."""
    install(mine=add("dig deep", "echo"), other=add("dig wide", "echo"))
    assert main(["dig", "deep", "a", "b"]) == 2
    assert capsys.readouterr().out == "a b\n"
    assert main(["dig"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: lmcore dig COMMAND")
    assert "\n  deep        Dig dig deep.\n  wide        Dig dig wide.\n" in out
    assert main(["dig", "depe"]) == 2
    err = capsys.readouterr().err
    assert "unknown command `lmcore dig depe`" in err
    assert "did you mean `deep`?" in err
    assert main(["--help"]) == 0
    assert "\nplugin mine:\n  dig deep    Dig dig deep.\n" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["checkpoint", "config", "data", "ops", "plugin"])
def test_groups_of_the_core_are_open(install, capsys, group) -> None:
    """A command of a plugin is listed with the core's and runs like them."""
    install(mine=add(f"{group} dig", "echo"))
    assert main([group, "dig", "x"]) == 1
    assert capsys.readouterr().out == "x\n"
    assert main([group, "--help"]) == 0
    assert f"\n  dig         Dig {group} dig.\n" in capsys.readouterr().out
    assert main([group, "dgi"]) == 2
    assert "did you mean `dig`?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "plugin mine:" not in capsys.readouterr().out  # `lmcore GROUP --help` has it


@pytest.mark.parametrize(
    "name, why",
    [
        ("train fast", "`train` is taken why: it is a command of lmcore"),
        ("help me", "`help` is taken why: it is a command of lmcore"),
        ("data merge", "the command `data merge`, which is taken why: it is lmcore's"),
    ],
)
def test_what_is_the_cores_cannot_be_taken(install, capsys, name, why) -> None:
    """A command of the core is no group, and no command of a group is replaced."""
    install(mine=add(name, "echo"))
    assert main(["--help"]) == 0
    assert why in " ".join(capsys.readouterr().err.split())


def test_the_cores_commands_look_for_no_plugins(install, capsys) -> None:
    """A plugin that fails is not even asked."""
    install(bad="1 / 0")
    assert main(["data", "merge", "--help"]) == 0
    assert capsys.readouterr().err == ""


def test_the_help_of_a_group_survives_a_wrong_allow_list(install, capsys, monkeypatch) -> None:
    """The core's commands are listed, and what is wrong is said."""
    monkeypatch.setenv("LMCORE_PLUGINS", "nowhere")
    assert main(["data"]) == 0
    shown = capsys.readouterr()
    assert "  merge " in shown.out
    assert "`LMCORE_PLUGINS` names the plugin `nowhere`" in shown.err
