"""Messages of checks about one thing: the noun is in the singular."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore_conformance.case_findings import CaseFindings
from lmcore_conformance.checks.device.tensors import offers_twice
from lmcore_conformance.op.call import difference


def test_a_case() -> None:
    """A check of one case says so."""
    findings = CaseFindings()
    findings.tried = 1
    assert findings.conclude() == "1 case"


def test_a_place() -> None:
    """A result that is not finite in one place is reported with this number."""
    found, wanted = torch.tensor([1.0, torch.nan]), torch.ones(2)
    assert str(difference(found, wanted, "linear", "float32")).endswith("in 1 place")


def test_an_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One policy, stager or backend is counted in the singular."""
    one = [SimpleNamespace(name="one")]
    for name in ("op_impls", "precision_policies", "recompute_policies", "checkpoint_stagers"):
        monkeypatch.setattr(f"lmcore.plugin.{name}", lambda *_: one)
    monkeypatch.setattr("lmcore.plugin.comm_backends", lambda *_: one * 2)
    bench: Any = SimpleNamespace(plugins=None, selection=None, device=None)
    assert offers_twice(bench) == (
        "1 kernel, 1 precision policy, 1 recompute policy, 1 checkpoint stager, "
        "2 communication backends"
    )
