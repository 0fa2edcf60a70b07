"""The hooks: each answers, and none loads torch before a device is created."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import pytest

from lmcore.config.load import load_config
from lmcore.contract import Check, Probe, ProbeState
from lmcore_xpu import plugin
from lmcore_xpu.settings import XpuSection

PROBE = Probe(
    "xpu",
    ProbeState.PRESENT,
    2,
    facts={"gpus": [{"generation": "Xe-HPC", "address": "0000:18:00.0"}] * 2},
)


def test_what_it_is() -> None:
    """Name, contract and the versions of torch that it works with."""
    info = plugin.lmcore_plugin_info()
    assert (info.name, info.api, info.torch) == ("xpu", ">=1.3,<2", ">=2.8")
    assert info.provides == ("xpu",)
    assert info.device_resources == {"k8s": "gpu.intel.com/i915", "slurm": "gpu"}
    points = importlib.metadata.entry_points(group="lmcore.plugins", name="xpu")
    assert all(point.value == "lmcore_xpu.plugin" for point in points)


def test_the_hooks_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe, environment and checks answer on any machine, and load no torch."""
    code = (
        "import os, sys; from lmcore.contract import Probe; from lmcore_xpu import plugin;"
        "probe = plugin.lmcore_probe(os.environ); assert isinstance(probe, Probe);"
        "plugin.lmcore_launch_env(probe, {'world_size': 2, 'local_world_size': 2});"
        "sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
    monkeypatch.setattr(os, "environ", {})
    place = {"world_size": 2, "local_world_size": 2, "local_rank": 1}
    assert plugin.lmcore_launch_env(PROBE, place)["CCL_LOCAL_RANK"] == "1"
    assert isinstance(plugin.lmcore_probe({}), Probe)
    assert all(isinstance(check, Check) for check in plugin.lmcore_doctor(PROBE))


def test_the_options() -> None:
    """`--xpu-...` flags come from the section that is registered."""
    found: list[type] = []

    class Registry:
        def add(self, section: type) -> None:
            found.append(section)

    registry: Any = Registry()
    plugin.lmcore_add_options(registry)
    assert found == [XpuSection]


def test_the_hooks_of_a_device(xpu: Any) -> None:
    """A device gets pinned buffers for checkpoints."""
    device = plugin.lmcore_create_device(PROBE, load_config([]).config)
    (stager,) = plugin.lmcore_checkpoint_stagers(device)
    assert stager.name == "buffers"
    assert plugin.lmcore_validate_config(device, load_config([]).config) == []
