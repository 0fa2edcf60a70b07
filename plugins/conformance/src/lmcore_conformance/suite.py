"""The suite as test classes, one for each level.

    python -m pytest --pyargs lmcore_conformance --accelerator mychip

collects this module.  A plugin's own tests may have it in a file of theirs,

    from lmcore_conformance.suite import *

which runs under `--accelerator mychip`, or subclass a level to mark or extend it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from lmcore_conformance.pytest_plugin import Conformance, TrialCheck

__all__ = [
    "TestContract",
    "TestDevice",
    "TestDistributed",
    "TestExtras",
    "TestOps",
    "TestTraining",
]


class _Level:
    """Runs each check of a level as a test."""

    level = ""

    def test(
        self,
        conformance_check: TrialCheck,
        conformance: Conformance,
        request: pytest.FixtureRequest,
    ) -> None:
        """Make one check of the plugin."""
        conformance.judge(conformance_check, request)


class TestContract(_Level):
    """Level 0: hooks, versions, probe, import cost, registration."""

    level = "L0"


class TestDevice(_Level):
    """Level 1: memory, streams, events, random numbers, dtypes, recovery."""

    level = "L1"


class TestOps(_Level):
    """Level 2: every op by every kernel, against float64."""

    level = "L2"


class TestTraining(_Level):
    """Level 3: losses, recomputation, precision, resume."""

    level = "L3"


class TestDistributed(_Level):
    """Level 4: collectives and data parallelism in two processes."""

    level = "L4"


class TestExtras(_Level):
    """Level 5: compile, graph capture, pinned memory, profiler, kernels of generation."""

    level = "L5"
