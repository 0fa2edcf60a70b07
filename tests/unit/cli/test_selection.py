"""Choosing the device for a command: the launcher's way, and a worker's."""

from __future__ import annotations

import os

import pytest

from lmcore.base.errors import ConfigError, DeviceError
from lmcore.cli.selection import find_plugins
from lmcore.plugin import HANDED_DOWN, PluginState, discover, select
from lmcore.runtime.device_choice import choose_device
from lmcore.runtime.launch.rank import RankInfo


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Only the CPU, and nothing of this process's own environment is left changed."""
    before = dict(os.environ)
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    monkeypatch.delenv(HANDED_DOWN, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_plugins_are_left_out_before_the_configuration_is_read():
    """Other flags, whose meaning may depend on the plugins, are not looked at."""
    with pytest.raises(ConfigError, match="the plugin `nosuch`"):
        find_plugins(["--unknown", "7", "--plugin-off", "nosuch", "--lr=1e-3"])
    found = find_plugins(["--unknown", "7", "--lr=1e-3"])
    assert [one.name for one in found if one.state is PluginState.USABLE] == ["cpu"]


def test_the_launcher_chooses_and_prepares_the_environment():
    """The chosen plugin's variables are set before torch is imported."""
    os.environ.pop("GOMP_SPINCOUNT", None)
    assert choose_device(find_plugins([]), None, RankInfo()).plugin == "cpu"
    assert "GOMP_SPINCOUNT" in os.environ


def test_a_worker_keeps_its_launchers_choice():
    """A selection from the launcher is verified and used unchanged, with its reason."""
    chosen = select(discover(env={"LMCORE_PLUGINS": ""}), requested="cpu", env={})
    os.environ[HANDED_DOWN] = chosen.to_json()
    os.environ["LMCORE_DEVICE"] = "nonsense"  # the launcher has decided; nobody asks again
    found = choose_device(find_plugins([]), None, RankInfo())
    assert found == chosen


def test_a_worker_that_cannot_follow_stops():
    """A plugin of another version is not what the launcher chose."""
    chosen = select(discover(env={"LMCORE_PLUGINS": ""}), requested="cpu", env={})
    version = f'"version": "{chosen.version}"'
    other = chosen.to_json().replace(version, '"version": "0.0"')
    assert other != chosen.to_json()
    os.environ[HANDED_DOWN] = other
    with pytest.raises(DeviceError) as error:
        choose_device(find_plugins([]), None, RankInfo())
    assert "0.0" in str(error.value)


def test_a_worker_cannot_choose_another_device():
    """`--device` in a worker must be what its launcher chose."""
    chosen = select(discover(env={"LMCORE_PLUGINS": ""}), requested="cpu", env={})
    os.environ[HANDED_DOWN] = chosen.to_json()
    plugins = find_plugins([])
    assert choose_device(plugins, "cpu", RankInfo()).plugin == "cpu"
    with pytest.raises(DeviceError, match="`--device chip`: the launcher of this process chose"):
        choose_device(plugins, "chip", RankInfo())
