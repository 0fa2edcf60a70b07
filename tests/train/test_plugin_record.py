"""`environment.json` names the plugins of a run and the contributions of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PLUGIN = """
import dataclasses

from lmcore.contract import (
    CommBackend, OpImpl, PluginInfo, full_policy, full_precision_policy,
    host_copy_stager,
)
from lmcore.hookspecs import hookimpl


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("onlyops", api=">=1.3,<2")


@hookimpl
def lmcore_op_impls():
    target = "lmcore.contract.op.reference:bias_gelu"
    return [
        OpImpl("bias_gelu", "six", target, priority=99),
        OpImpl("layer_norm", "never", "lmcore.contract.op.reference:layer_norm", priority=-1),
    ]


@hookimpl
def lmcore_comm_backends(device):
    return [CommBackend("gloo", device.type, priority=99, supports_average=False)]


@hookimpl
def lmcore_precision_policies(device):
    return [dataclasses.replace(full_precision_policy(), name="mine", priority=-1)]


@hookimpl
def lmcore_recompute_policies():
    return [dataclasses.replace(full_policy(), name="again")]


@hookimpl
def lmcore_checkpoint_stagers():
    return [dataclasses.replace(host_copy_stager(), name="slow", priority=99)]
"""

OFFERED = ("comm_backends", "op_impls", "precision_policies", "recompute_policies")


@pytest.fixture
def _onlyops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a plugin without a device that offers one of each kind."""
    site = tmp_path / "site"
    record = site / "lmcore_onlyops-0.3.dist-info"
    record.mkdir(parents=True)
    (site / "lmcore_onlyops.py").write_text(PLUGIN)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcore-onlyops\nVersion: 0.3\n")
    (record / "entry_points.txt").write_text("[lmcore.plugins]\nonlyops = lmcore_onlyops\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setenv("LMCORE_PLUGINS", "onlyops")
    monkeypatch.delitem(sys.modules, "lmcore_onlyops", raising=False)


@pytest.mark.usefixtures("_onlyops")
def test_each_plugin_with_its_contributions(train) -> None:
    """A device's plugin and one without a device: versions, bound kernels, chosen policies."""
    run = train("run", "--device cpu --train-iters 1 --precision mine --recompute again")
    assert run.status == 0, run.err
    environment = json.loads((run.directory / "environment.json").read_text())
    cpu, onlyops = environment["plugins"]
    assert (cpu["name"], cpu["distribution"], cpu["brings"]["device"]) == ("cpu", "lmcore", "cpu")
    assert set(cpu["brings"]) == {"device", "kernels"}
    assert cpu["version"] == environment["lmcore"]
    assert onlyops == {
        "name": "onlyops",
        "distribution": "lmcore-onlyops",
        "version": "0.3",
        "hooks": [
            "lmcore_plugin_info",
            *(f"lmcore_{kind}" for kind in (*OFFERED, "checkpoint_stagers")),
        ],
        "brings": {
            "kernels": {"bias_gelu": ["six"]},
            "precision": "mine",
            "recompute": "again",
            "checkpoint_stager": "slow",
        },
    }
    assert environment["precision"]["plugin"] == "onlyops"
    assert environment["recompute"]["plugin"] == "onlyops"
    assert environment["checkpoint_stager"] == {"name": "slow", "plugin": "onlyops"}
    assert environment["comm_backend"] is None
    run = train("plain", "--device cpu --train-iters 1 --ops bias_gelu=reference")
    environment = json.loads((run.directory / "environment.json").read_text())
    assert environment["precision"]["plugin"] == "lmcore"
    assert environment["plugins"][1]["brings"] == {"checkpoint_stager": "slow"}
