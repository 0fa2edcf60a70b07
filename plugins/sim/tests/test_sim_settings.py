"""Settings from the environment (devices, memory, faults), and answers of the probe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.contract import ProbeState, torch_build
from lmcore_sim.build import LIBRARY, RECORD
from lmcore_sim.faults import FaultRule, Faults, parse_faults
from lmcore_sim.probe import library_problem, probe
from lmcore_sim.settings import read_settings


def test_defaults() -> None:
    """The defaults are two devices of 16 GiB without faults."""
    settings = read_settings({})
    assert (settings.num_devices, settings.memory_bytes) == (2, 16 * 2**30)
    assert not settings.faults.any


@pytest.mark.parametrize(
    "text, expected",
    [("64MiB", 64 * 2**20), ("1.5GiB", 3 * 2**29), ("1000", 1000), ("2 KiB", 2048)],
)
def test_memory_is_read(text: str, expected: int) -> None:
    """Memory is a number of bytes or of a binary unit."""
    assert read_settings({"LMCORE_SIM_MEMORY": text}).memory_bytes == expected


@pytest.mark.parametrize(
    "name, value",
    [
        ("LMCORE_SIM_DEVICES", "two"),
        ("LMCORE_SIM_DEVICES", "-1"),
        ("LMCORE_SIM_DEVICES", "65"),
        ("LMCORE_SIM_MEMORY", "much"),
        ("LMCORE_SIM_MEMORY", "1TB"),
        ("LMCORE_SIM_FAULTS", "explode"),
    ],
)
def test_malformed_settings_break_the_device(name: str, value: str) -> None:
    """The probe calls a device with such an environment broken, names the value and helps."""
    with pytest.raises(ConfigError):
        read_settings({name: value})
    found = probe({name: value})
    assert found.state is ProbeState.BROKEN
    assert value in found.evidence[0]
    assert found.fix


def test_rules_are_read() -> None:
    """Each part of a rule arrives in its field, with the kind's default value."""
    assert parse_faults("fail:mm@3; wrong:gelu=1.5;slow=5ms;lose@200#1;hang:all_reduce@2#0") == (
        Faults(
            (
                FaultRule("fail", "mm", 3),
                FaultRule("wrong", "gelu", 0, 1.5),
                FaultRule("slow", "", 0, 0.005),
                FaultRule("lose", "", 200, 0.0, 1),
                FaultRule("hang", "all_reduce", 2, 0.0, 0),
            )
        )
    )
    switches = frozenset({"no-rng-restore", "no-autocast"})
    assert parse_faults("no-rng-restore;no-autocast") == Faults((), switches)
    only = parse_faults("autocast-only:mm; autocast-only:bmm")
    assert only == Faults(autocast_only=("mm", "bmm"))
    assert parse_faults("wrong").rules == (FaultRule("wrong", "", 0, 1.01),)
    unhealthy = parse_faults("unhealthy@3#1; unhealthy@9")
    assert unhealthy == Faults(
        unhealthy=(FaultRule("unhealthy", "", 3, 0.0, 1), FaultRule("unhealthy", "", 9))
    )
    assert [unhealthy.unhealthy_from({"RANK": rank}) for rank in "01"] == [9, 3]
    assert parse_faults(" ; ") == Faults()


@pytest.mark.parametrize(
    "text",
    ["fail:", "fail@0", "fial:mm", "fail=2", "slow=5", "slow=x", "wrong=no", "no-autocast@2",
     "autocast-only", "autocast-only:gelu", "autocast-only:mm@2",
     "hang:mm=1", "fail:mm#x", "unhealthy:mm", "unhealthy=2"],
)  # fmt: skip
def test_wrong_rules_are_refused(text: str) -> None:
    """A rule that is none is named, with a hint."""
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert text in caught.value.what
    assert caught.value.hint


def test_rules_of_a_rank() -> None:
    """A rule with a rank is for that process alone; without RANK a process is rank 0."""
    faults = parse_faults("fail:mm#1;lose")
    assert [rule.kind for rule in faults.of_rank({"RANK": "1"})] == ["fail", "lose"]
    assert [rule.kind for rule in faults.of_rank({})] == ["lose"]


def test_no_devices() -> None:
    """Zero devices is an absent device, whatever the library."""
    found = probe({"LMCORE_SIM_DEVICES": "0"}, Path("/nowhere"))
    assert found.state is ProbeState.ABSENT


def _library(folder: Path, torch: str) -> Path:
    (folder / LIBRARY).touch()
    python = ".".join(map(str, sys.version_info[:2]))
    (folder / RECORD).write_text(json.dumps({"torch": torch, "python": python}))
    return folder


def test_a_library_that_fits(tmp_path: Path) -> None:
    """With a library for this torch the devices are there, below any real accelerator."""
    _library(tmp_path, torch_build("cpu").version)
    found = probe({"LMCORE_SIM_DEVICES": "3", "LMCORE_SIM_FAULTS": "lose@9"}, tmp_path)
    assert (found.state, found.count) == (ProbeState.PRESENT, 3)
    assert found.priority < 100
    assert "told to misbehave" in found.evidence[0]


def test_libraries_that_do_not_fit(tmp_path: Path) -> None:
    """A library that is missing, of another torch or Python, or of unknown origin breaks it."""
    assert "is missing" in str(library_problem(tmp_path))
    (tmp_path / "_C.cpython-39-other.so").touch()
    assert "another Python" in str(library_problem(tmp_path))
    _library(tmp_path, "1.0.0+old")
    found = probe({}, tmp_path)
    assert found.state is ProbeState.BROKEN
    assert "torch 1.0.0+old" in found.evidence[1]
    assert found.fix == "run `python -m lmcore_sim.build`"
    (tmp_path / RECORD).write_text("{}")
    assert "cannot be read" in str(library_problem(tmp_path))


def test_the_plugin_loads_no_torch() -> None:
    """Importing the plugin, probing and launching load neither torch nor the library."""
    code = (
        "import os, sys; from lmcore_sim import plugin; plugin.lmcore_plugin_info(); "
        "plugin.lmcore_probe(os.environ); plugin.lmcore_launch_env({'local_world_size': 2}); "
        "assert 'torch' not in sys.modules and 'lmcore_sim._C' not in sys.modules"
    )
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=paths
    )
    assert done.returncode == 0, done.stderr
