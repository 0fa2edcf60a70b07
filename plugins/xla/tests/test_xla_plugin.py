"""The plugin's hooks, settings and peak rates, without torch_xla."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lmcore.config.load import load_config
from lmcore.contract import Probe, ProbeState
from lmcore_xla import comm, plugin
from lmcore_xla.peaks import peak_flops


def test_workers_get_the_client_that_the_probe_has_found():
    found = Probe("xla", ProbeState.PRESENT, 1, facts={"pjrt_device": "TPU"})
    env = plugin.lmcore_launch_env(found)
    assert env == {"PJRT_DEVICE": "TPU", "XLA_NO_SPECIAL_SCALARS": "1"}


def test_peaks_are_those_of_bfloat16():
    """A TPU multiplies float32 in several passes: there is no figure."""
    rate = peak_flops("TPU v4")
    assert rate is not None
    assert (rate("bfloat16"), rate("float32")) == (275e12, None)
    assert peak_flops("PJRT's CPU client") is None


@pytest.mark.parametrize("processes,expected", [(1, "does not connect processes"), (4, None)])
def test_torch_xlas_collectives_need_a_client_that_connects_processes(
    monkeypatch, processes, expected
):
    package, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
    runtime.process_count = lambda: processes  # type: ignore[attr-defined]
    runtime.device_type = lambda: "TPU"  # type: ignore[attr-defined]
    package.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    first, second = comm.backends()
    assert (first.name, second.name) == ("xla", "xla_gloo")
    assert first.priority > second.priority
    reason = first.available()
    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize(
    "flags,processes,refused",
    [
        ("--zero-stage 1", 2, True),
        ("--use-distributed-optimizer", 2, True),
        ("--zero-stage 3", 1, False),
        ("--zero-stage 0", 2, False),
    ],
)
def test_zero_is_refused_over_several_processes(monkeypatch, flags, processes, refused):
    """It is torch's FSDP; its error would be about the name of a process group."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    problems = plugin.lmcore_validate_config(load_config(flags.split()).config)
    assert [problem.what for problem in problems] == ["ZeRO is not available on PJRT devices"][
        : int(refused)
    ]
