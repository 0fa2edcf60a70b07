"""`lmcore doctor`: its own checks, and plugins that answer, fail, crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from lmcore.accelerator import CheckStatus
from lmcore.cli import doctor
from lmcore.data import native
from lmcore.plugins import PluginRecord, PluginSet, PluginState

SOURCE = """
import ctypes, os, sys, time
from lmcore.accelerator import Check, CheckStatus, PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("patient", ">=1,<2")

@hookimpl
def lmcore_probe():
    return Probe("patient", ProbeState.{state}, {count}, evidence=("seen",), fix="see a smith")

@hookimpl
def lmcore_doctor(probe):
    print("noise on standard output")
    {body}
"""
ONE_CHECK = 'return [Check("pulse", CheckStatus.{}, "60", "run less")]'


@pytest.fixture
def clinic(tmp_path, monkeypatch):
    """Return a function that installs one plugin whose check has this body, for child processes."""

    def admit(body: str, state: str = "PRESENT") -> None:
        count = 0 if state == "ABSENT" else 1
        source = SOURCE.format(body=body, state=state, count=count)
        (tmp_path / "patient_plugin.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = tmp_path / "lmcore_patient-0.9.dist-info"
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: lmcore-patient\nVersion: 0.9\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = "[lmcore.plugins]\npatient = patient_plugin\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("LMCORE_PLUGINS", "patient")
        monkeypatch.delenv("LMCORE_DEVICE", raising=False)

    return admit


@pytest.fixture
def patient(clinic):
    """Return a function that runs `lmcore doctor` with one plugin whose check has this body."""

    def examine(
        body: str, *arguments: str, state: str = "PRESENT", text: bool = False
    ) -> tuple[int, dict | str]:
        clinic(body, state)
        done = subprocess.run(
            [sys.executable, "-m", "lmcore.cli.main", "doctor", *arguments]
            + ([] if text else ["--json"]),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, done.stdout if text else json.loads(done.stdout)

    return examine


PATIENT = types.SimpleNamespace(
    name="patient",
    distribution="lmcore-patient",
    state=PluginState.USABLE,
    probe=None,
    implements=lambda hook: True,
)
"""What `plugin_checks` looks at of a record."""


def checks_of(found: dict, group: str) -> dict:
    (checks,) = [one["checks"] for one in found["groups"] if one["name"].startswith(group)]
    return {check["name"]: check for check in checks}


def test_a_healthy_plugin_is_a_few_good_lines(patient):
    """Its probe and its own checks appear, noise on its standard output does not matter."""
    status, found = patient(ONE_CHECK.format("OK"))
    checks = checks_of(found, "plugin patient (lmcore-patient 0.9)")
    assert checks["pulse"] == {
        "name": "pulse", "status": "ok", "detail": "60", "fix": "run less"
    }  # fmt: skip
    assert checks["device patient"]["status"] == "ok"
    assert checks_of(found, "plugin cpu")["matrix product"]["status"] == "ok"
    assert found["passed"]
    assert status == 0


def test_a_failed_check_is_exit_status_1(patient):
    """The fix is printed, and a script can tell."""
    status, text = patient(ONE_CHECK.format("FAILED"), text=True)
    assert status == 1
    assert "fix: run less" in text
    assert "1 failed" in text


def test_a_warning_is_exit_status_0(patient):
    """What is merely slow is no failure."""
    status, found = patient(ONE_CHECK.format("WARNING"))
    assert status == 0
    assert checks_of(found, "plugin patient")["pulse"]["status"] == "warning"


@pytest.mark.parametrize(
    "body, words",
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("os._exit(7)", "status 7"),
        ('raise OSError("no pulse")', "no pulse"),
        ('return ["fine"]', "list of `Check`"),
        ("return None", "list of `Check`"),
    ],
)
def test_a_crash_is_a_line_of_the_report(clinic, body, words):
    """Native crashes, exits, exceptions and wrong answers end in one failed line."""
    clinic(body)
    (check,) = doctor.plugin_checks(PATIENT, 60.0)
    assert check.status is CheckStatus.FAILED
    assert words in check.detail
    assert "lmcore-patient" in check.fix


def test_a_crash_leaves_the_other_plugins_their_lines(patient):
    """The report goes on after a native crash, and its exit status tells of it."""
    status, found = patient("os.kill(os.getpid(), 11)")
    assert checks_of(found, "plugin patient")["checks"]["status"] == "failed"
    assert checks_of(found, "plugin cpu")["matrix product"]["status"] == "ok"
    assert status == 1


def test_a_hanging_check_is_stopped(clinic):
    """The time limit ends it."""
    clinic("time.sleep(1000)")
    (check,) = doctor.plugin_checks(PATIENT, 3.0)
    assert check.status is CheckStatus.FAILED
    assert "no answer within 3 s" in check.detail


@pytest.mark.parametrize(
    "state, wanted, passed", [("ABSENT", "skipped", True), ("BROKEN", "failed", False)]
)
def test_an_absent_device_passes_and_a_broken_one_does_not(patient, state, wanted, passed):
    """Hardware that is not there is no fault; hardware that cannot be used is, twice."""
    status, found = patient("return []", state=state)
    assert checks_of(found, "plugin patient")["device patient"]["status"] == wanted
    assert checks_of(found, "lmcore")["device"]["status"] == ("ok" if passed else "failed")
    assert status == (0 if passed else 1)
    if not passed:
        assert checks_of(found, "plugin patient")["device patient"]["fix"] == "see a smith"


def test_the_core_is_checked():
    """Interpreter, packages, native code, disk and device each have a line."""
    names = [check.name for check in doctor.core_checks(PluginSet(()))]
    assert names[:2] == ["python", "packages"]
    assert names[-3:] == ["index builder", "disk", "device"]


def test_a_missing_native_builder_is_a_warning_with_its_fix(monkeypatch):
    """The Python version works, so it is a warning, and the fix is named."""
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "reason", "installed without a compiler")
    (check,) = [one for one in doctor.core_checks(PluginSet(())) if one.name == "index builder"]
    assert check.status is CheckStatus.WARNING
    assert check.detail == "installed without a compiler"
    assert check.fix == "install a C++ compiler (g++), then install lmcore again from its folder"


@pytest.mark.parametrize("free, status", [(10**12, "ok"), (10**9, "warning"), (10**7, "failed")])
def test_little_disk_space_is_told(monkeypatch, free, status):
    """Less than 5 GB is a warning, less than 0.1 GB a failure."""
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    (check,) = [one for one in doctor.core_checks(PluginSet(())) if one.name == "disk"]
    assert check.status == status


def test_packages_out_of_range_or_missing_are_failures(monkeypatch):
    """Each has the range that is needed and the command that brings it."""
    needs = ["numpy>=2.0", "torch>=99", "nonesuch>=1", 'other; extra == "test"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: needs)
    checks = {check.name: check for check in doctor.core_checks(PluginSet(()))}
    assert checks["torch"].status is CheckStatus.FAILED
    assert ">=99" in checks["torch"].detail
    assert checks["nonesuch"].fix == "pip install 'nonesuch>=1'"
    assert "numpy" in checks["packages"].detail
    assert "other" not in checks


@pytest.mark.parametrize(
    "state, status",
    [("off", "skipped"), ("failed", "failed"), ("refused", "failed")],
)
def test_a_plugin_out_of_service_is_one_line(state, status):
    """Its reason is the detail."""
    one = PluginRecord("chip", "chip", "lmcore-chip", "1", PluginState(state), "cracked")
    (check,) = doctor.plugin_checks(one, 1.0)
    assert (check.status, check.detail) == (status, "cracked")


def test_text_output_is_aligned(patient):
    """Every line of a group starts with its status."""
    _, text = patient(ONE_CHECK.format("OK"), text=True)
    lines = text.splitlines()
    start = lines.index("plugin patient (lmcore-patient 0.9)")
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["ok", "ok"]
    assert Path.cwd().name in text
