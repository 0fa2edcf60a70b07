"""Findings about kernels: what is wrong, and whether `supports` accepted the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore_conformance.op.findings import Findings
from lmcore_conformance.registry import Failure


def kernel(supports: Any) -> Any:
    return SimpleNamespace(id="attention=fast", impl=SimpleNamespace(supports=supports))


def test_a_supports_that_accepted_is_named() -> None:
    """The finding about a kernel says whether its `supports` accepted the call."""
    for supports, named in ((lambda _context: None, True), (None, False)):
        findings = Findings()
        with findings.of(kernel(supports), "head dim 80, float32") as add:
            add("the output is wrong")
        with pytest.raises(Failure, match="head dim 80, float32: the output is wrong") as caught:
            findings.conclude()
        assert ("its `supports` accepts this call" in str(caught.value)) is named
