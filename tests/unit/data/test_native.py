"""Use of the C++ parts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lmcore.data import native


def test_those_that_were_built_here_are_used() -> None:
    """A module that exists has this version."""
    pytest.importorskip("lmcore._native", reason="needs the C++ parts")
    assert native.available, native.reason


@pytest.mark.parametrize("module", [SimpleNamespace(__file__="old.so"), None])
def test_those_of_another_version_are_not(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """An older module, or none, is a reason for the Python twins, and not an error in mid-run."""
    monkeypatch.setitem(sys.modules, "lmcore._native", module)
    builders, reason = native._load()
    assert builders is None
    assert "many times slower" in reason
    if module is not None:
        assert "`old.so` is of another version of lmcore" in reason
