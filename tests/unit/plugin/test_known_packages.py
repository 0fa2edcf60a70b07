"""Packages for devices that are not installed."""

from __future__ import annotations

import importlib.metadata
import types

import pytest

from lmcore.base.errors import DeviceError
from lmcore.contract import Probe, ProbeState
from lmcore.plugin import PluginRecord, PluginSet, PluginState, select
from lmcore.plugin.known_packages import device_packages

CPU = PluginRecord(
    "cpu", "cpu", "lmcore", "1", PluginState.USABLE, probe=Probe("cpu", ProbeState.PRESENT, 1, 0)
)
NEEDS = [
    "numpy>=2.0",
    'lmcore-chip; extra == "chip"',
    'lmcore_Big.Iron>=1; extra == "big-iron"',
    'otherengine; extra == "otherengine"',
    'lmcore-serve; extra == "serve"',
    'pytest>=9; extra == "test"',
]


@pytest.fixture
def extras(monkeypatch):
    """The metadata of an lmcore with two device plugins among its extras."""
    names = ["chip", "big-iron", "otherengine", "serve", "test"]
    found = types.SimpleNamespace(get_all=lambda key: names)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: NEEDS)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: found)


def test_extras_that_are_devices(extras):
    """An extra is a device's if it requires the plugin of the same name; one of commands is not."""
    assert device_packages() == {"chip": "lmcore-chip", "big-iron": "lmcore_Big.Iron"}


def test_without_metadata_none_is_known(monkeypatch):
    """Run from its sources, lmcore knows no packages, and nothing fails."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert device_packages() == {}


def hint_for(named: str) -> str:
    with pytest.raises(DeviceError) as caught:
        select(PluginSet((CPU,)), requested=named, env={})
    assert caught.value.what == f"`--device {named}`: no usable plugin has this device"
    return caught.value.hint


def test_a_known_device_that_is_not_installed_has_its_command(extras):
    """The extra is the command, and the installed devices are listed."""
    assert hint_for("chip") == (
        "known: `cpu`; `chip` comes with the package `lmcore-chip`: run "
        '`pip install "lmcore[chip]"`, with the index or folder that lmcore came from'
    )


def test_an_unknown_device_has_the_known_packages(extras):
    """No command is made up for a name that lmcore does not know."""
    hint = hint_for("tulip")
    assert "not installed: `big-iron` (`lmcore_Big.Iron`), `chip` (`lmcore-chip`)" in hint
    assert "lmcore-tulip" not in hint
    assert "pip install" not in hint


def test_an_installed_device_is_not_proposed_again(extras):
    """An installed package is listed as known only."""
    here = PluginRecord(
        *("chip", "chip", "lmcore-chip", "1", PluginState.USABLE),
        probe=Probe("chip", ProbeState.ABSENT),
    )
    with pytest.raises(DeviceError) as caught:
        select(PluginSet((CPU, here)), requested="chap", env={})
    assert "known: `chip`, `cpu`" in caught.value.hint
    assert "(`lmcore-chip`)" not in caught.value.hint


def test_the_real_extras_are_device_plugins():
    """Lmcore's own metadata, where it is installed, names its device plugins."""
    for device, package in device_packages().items():
        assert package == f"lmcore-{device}"


def test_the_cpu_is_suggested_only_for_its_own_name(extras):
    """`CPU` and `cpu:0` mean the CPU; `gpu`, which is one letter away, does not."""
    assert all("did you mean `cpu`?" in hint_for(named) for named in ("CPU", "cpu:0"))
    assert "did you mean" not in hint_for("gpu")
