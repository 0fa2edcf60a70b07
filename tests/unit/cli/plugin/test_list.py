"""`lmcore plugins` over real installed distributions, good and bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.plugin import list as command
from lmcore.contract.probe import API_VERSION
from lmcore.plugin.known_packages import device_packages

PREAMBLE = """
from lmcore.contract import PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl
"""

GOOD = f"""{PREAMBLE}
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("good", ">=1,<2", provides=("goodchip",))

@hookimpl
def lmcore_probe(env):
    state = ProbeState(env.get("GOOD_STATE", "present"))
    count = 0 if state == "absent" else 2
    facts = {{"driver": "5.1", "runtime": "chips 7", "torch_build": "9.9", "serial": 7}}
    found = ("two chips on the bus",)
    return Probe("goodchip", state, count, evidence=found, fix="mend it", facts=facts)
"""

RAISING = 'raise ImportError("libraising.so.4: undefined symbol")'

STALE = GOOD.replace('"good", ">=1,<2"', '"stale", ">=9"')

UNKNOWN_ARGUMENT = f"""{PREAMBLE}
@hookimpl
def lmcore_plugin_info(phase_of_moon):
    return PluginInfo("odd", ">=1")
"""

WRONG_TYPES = f"""{PREAMBLE}
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("wrong", ">=1")

@hookimpl
def lmcore_probe():
    return {{"state": "present"}}
"""


@pytest.fixture
def install(tmp_path):
    """Return a function that lays out an installed distribution with one plugin."""

    def build(name: str, source: str, *, entry_point: str | None = None) -> Path:
        module = f"plugin_of_{name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = tmp_path / f"{name.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n", encoding="utf-8"
        )
        points = f"[lmcore.plugins]\n{entry_point or name} = {module}\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        return tmp_path

    return build


def lmcore(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `lmcore` in a process that has the distributions of *folder* installed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "lmcore.cli.main", *arguments],
        env={**inherited, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def report(folder: Path, *arguments: str, **env: str) -> dict:
    """Return what `lmcore plugins --json` prints."""
    done = lmcore(folder, "plugins", "--json", *arguments, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_name(found: dict) -> dict:
    return {one["name"]: one for one in found["plugins"]}


def test_a_zoo_of_bad_plugins_leaves_the_good_ones_alive(install):
    """Each bad distribution is a row with its reason; the good one is chosen."""
    install("good", GOOD)
    install("raising", RAISING)
    install("stale", STALE)
    install("odd", UNKNOWN_ARGUMENT)
    install("wrong", WRONG_TYPES)
    install("twin-a", GOOD, entry_point="twin")
    folder = install("twin-b", GOOD, entry_point="twin")
    found = report(folder)
    plugins = by_name(found)
    states = {name: one["state"] for name, one in plugins.items()}
    assert states | {"cpu": "usable"} == states
    expected = {
        "good": "usable",
        "raising": "failed",
        "stale": "refused",
        "odd": "failed",
        "wrong": "failed",
        "twin": "failed",
    }
    assert states | expected == states
    assert "libraising.so.4: undefined symbol" in plugins["raising"]["reason"]
    assert "ImportError" in plugins["raising"]["traceback"]
    assert ">=9" in plugins["stale"]["reason"]
    assert "phase_of_moon" in plugins["odd"]["reason"]
    assert "not a `Probe`" in plugins["wrong"]["reason"]
    assert "twin-a" in plugins["twin"]["reason"]
    assert "twin-b" in plugins["twin"]["reason"]
    assert sum(one["name"] == "twin" for one in found["plugins"]) == 2
    good = plugins["good"]
    assert (good["version"], good["distribution"]) == ("1.2.3", "good")
    assert (good["device"], good["device_state"], good["count"]) == ("goodchip", "present", 2)
    assert good["evidence"] == ["two chips on the bus"]
    assert good["selected"]
    assert found["selection"]["plugin"] == "good"
    assert len(found["selection"]["warnings"]) == 6
    assert found["error"] is None


def test_a_failed_plugin_alone_means_no_silent_cpu(install):
    """No device is chosen if only a failed plugin might have one."""
    folder = install("raising", RAISING)
    found = report(folder, LMCORE_PLUGINS="raising")
    assert found["selection"] is None
    assert "libraising.so.4" in found["error"]["why"]
    assert "--device cpu" in found["error"]["hint"]
    assert by_name(found)["cpu"]["reason"] == "ready: its device is present"
    chosen = report(folder, "--device", "cpu", LMCORE_PLUGINS="raising")["selection"]
    assert chosen["plugin"] == "cpu"


def test_environment_variables_reach_discovery_and_selection(install):
    """`LMCORE_PLUGINS` and `LMCORE_DEVICE` work as documented."""
    folder = install("good", GOOD)
    off = report(folder, LMCORE_PLUGINS="")
    assert by_name(off)["good"]["state"] == "off"
    assert off["selection"]["plugin"] == "cpu"
    assert report(folder, LMCORE_DEVICE="cpu")["selection"]["plugin"] == "cpu"
    absent = report(folder, LMCORE_PLUGINS="good", GOOD_STATE="absent")
    assert absent["selection"]["plugin"] == "cpu"
    assert "two chips on the bus" in absent["selection"]["notice"]


def test_the_table_shows_every_plugin_with_its_reason(install):
    """The text for people has name, device, distribution, version, state and reason."""
    install("good", GOOD)
    folder = install("raising", RAISING)
    done = lmcore(folder, "plugins", LMCORE_PLUGINS="good,raising", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "1.2.3" in line}
    assert rows["raising"] == ["raising", "-", "raising", "1.2.3", "failed"]
    assert "* good" in done.stdout
    assert "goodchip x2" in done.stdout
    assert "found: two chips on the bus" in done.stdout
    assert f"requires: plugin API >=1,<2 (here {API_VERSION}), torch >=2.8 (here " in done.stdout
    assert "versions: driver 5.1, runtime chips 7, torch build 9.9" in done.stdout
    assert "fix: repair, update or uninstall `raising`" in done.stdout
    assert "libraising.so.4: undefined symbol" in done.stdout
    assert "Traceback" not in done.stdout
    assert "A run uses `goodchip`, 2 devices" in done.stdout
    verbose = lmcore(folder, "plugins", "--verbose", LMCORE_PLUGINS="good,raising")
    assert "Traceback" in verbose.stdout


def test_a_broken_device_is_shown_with_its_fix(install):
    """The table has evidence and fix, and the choice is left to the user."""
    folder = install("good", GOOD)
    done = lmcore(folder, "plugins", LMCORE_PLUGINS="good", GOOD_STATE="broken")
    assert done.returncode == 0
    assert "fix: mend it" in done.stdout
    assert "A run cannot start until you choose a device" in done.stdout
    assert "--device cpu" in done.stdout


def test_the_real_error_of_an_unknown_name_in_the_allow_list(install):
    """A typo in `LMCORE_PLUGINS` is a usage error."""
    done = lmcore(install("good", GOOD), "plugins", LMCORE_PLUGINS="godo")
    assert done.returncode == 2
    assert "did you mean `good`?" in done.stderr


def test_device_packages_that_are_not_installed_are_listed(install):
    """Packages in lmcore's metadata that are not installed are listed."""
    missing = report(install("good", GOOD))["not_installed"]
    assert missing.items() <= device_packages().items()
    if not missing:
        pytest.skip("lmcore is run from its sources, or all its device packages are installed")
    device, package = next(iter(missing.items()))
    folder = install(package, GOOD)
    assert device not in report(folder)["not_installed"]
    assert f"`{device}` (`{package}`)" not in lmcore(folder, "plugins").stdout


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_lines_fit_the_terminal(install, columns):
    """No line is wider than the terminal, but for commands, which are not broken."""
    install("good", GOOD)
    install("raising", RAISING)
    folder = install("a-name-of-many-words", GOOD, entry_point="good-with-words")
    done = lmcore(folder, "plugins", "--device", "cpu", COLUMNS=columns)
    assert "a-name-of-many-words" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "`" not in line]
    assert len(lines) > 8
    assert max(len(line) for line in lines) <= int(columns)


def test_no_torch_is_loaded(install):
    """Listing plugins stays quick."""
    script = (
        "import sys; from lmcore.cli.plugin.list import run; run(['--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


def test_a_wrong_flag_is_a_usage_error():
    """Flags come from the section."""
    with pytest.raises(ConfigError, match="--jsn"):
        command.run(["--jsn"])


def test_help_names_the_environment(capsys):
    """`--help` prints and exits with 0."""
    with pytest.raises(SystemExit) as end:
        command.run(["--help"])
    assert end.value.code == 0
    assert "LMCORE_PLUGINS" in capsys.readouterr().out


def test_refused_device_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """`--device` of a device that is not there is an error with status 2, also as JSON."""
    assert command.run(["--device", "nothing"]) == 2
    assert "`--device nothing`" in capsys.readouterr().out
    assert command.run(["--device", "nothing", "--json"]) == 2
    assert command.run(["--device", "cpu"]) == 0


def test_a_device_of_the_environment_that_no_plugin_has(tmp_path):
    """`LMCORE_DEVICE` is refused as `--device` is, with status 2."""
    done = lmcore(tmp_path, "plugins", LMCORE_DEVICE="nope")
    assert done.returncode == 2
    assert "error: `LMCORE_DEVICE=nope`: no usable plugin has this device" in done.stdout


def test_plugins_with_the_same_device_are_named(install):
    """A reader learns that a run has a choice, and how to make it."""
    folder = install("good", GOOD)
    assert report(folder)["overlaps"] == {}
    install("better", GOOD.replace('"good"', '"better"'))
    assert sorted(report(folder)["overlaps"]["goodchip"]) == ["better", "good"]
    shown = " ".join(lmcore(folder, "plugins").stdout.split())
    assert "bring the same device, `goodchip`: `--plugin-off NAME` leaves one out." in shown
