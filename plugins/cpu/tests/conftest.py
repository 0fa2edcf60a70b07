"""Facts of other processors for every test of the CPU plugin."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _processor(processor: str) -> None:
    """Run with the facts of other processors, too."""
