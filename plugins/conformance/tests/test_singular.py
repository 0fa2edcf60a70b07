"""Messages of checks about one thing: the noun is in the singular."""

from __future__ import annotations

import torch

from lmcore_conformance.case_findings import CaseFindings
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
