"""Checks of lmcore itself by `lmcore doctor`."""

from __future__ import annotations

import types

import pytest

from lmcore.accelerator import CheckStatus
from lmcore.cli.doctor import core as doctor_core
from lmcore.cli.doctor.core import core_checks
from lmcore.data import native
from lmcore.plugin import PluginSet


def checks() -> dict:
    return {check.name: check for check in core_checks(PluginSet(()))}


def test_the_core_is_checked():
    """Interpreter, packages, native code, disk and device each have a line."""
    names = list(checks())
    assert names[:2] == ["python", "packages"]
    assert names[-3:] == ["native code", "disk", "device"]


def test_a_missing_native_builder_is_a_warning_with_its_fix(monkeypatch):
    """The Python version works, so it is a warning, and the fix is named."""
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "reason", "installed without a compiler")
    check = checks()["native code"]
    assert check.status is CheckStatus.WARNING
    assert check.detail == "installed without a compiler"
    assert check.fix == "install a C++ compiler (g++), then install lmcore again from its folder"


def test_a_deleted_working_directory_is_a_failure(monkeypatch):
    """The check names it, and the other checks are made."""

    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(doctor_core.Path, "cwd", gone)
    assert checks()["disk"].status is CheckStatus.FAILED


@pytest.mark.parametrize("free, status", [(10**12, "ok"), (10**9, "warning"), (10**7, "failed")])
def test_little_disk_space_is_reported(monkeypatch, free, status):
    """Less than 5 GB is a warning, less than 0.1 GB a failure."""
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(doctor_core.shutil, "disk_usage", lambda folder: usage)
    assert checks()["disk"].status == status


def test_packages_out_of_range_or_missing_are_failures(monkeypatch):
    """Each has the range that is needed and the command that brings it."""
    needs = ["numpy>=2.0", "torch>=99", "nonesuch>=1", 'other; extra == "test"']
    monkeypatch.setattr(doctor_core.importlib.metadata, "requires", lambda name: needs)
    found = checks()
    assert found["torch"].status is CheckStatus.FAILED
    assert ">=99" in found["torch"].detail
    assert found["nonesuch"].fix == "pip install 'nonesuch>=1'"
    assert "numpy" in found["packages"].detail
    assert "other" not in found
