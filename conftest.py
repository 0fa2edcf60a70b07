"""Plugins of every test session: the selection of tests, time limits, numbers of examples.

The modules are in `tests/lib`, which `pythonpath` in pyproject.toml puts on the path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:  # an environment that runs a few tests only
    settings = None

OURS = str(Path(__file__).parent / "tests" / "lib") in sys.path
"""False in a session of another project, which loads this file too if it collects a package that is
installed below this folder, as in `.tox`."""

pytest_plugins = ["suite.selection", "suite.durations", "suite.processors"] if OURS else []

if settings is not None:
    # A busy machine is no failure: no example has a deadline.
    settings.register_profile("fast", max_examples=25, deadline=None)
    settings.register_profile("full", max_examples=300, deadline=None)


@pytest.hookimpl(trylast=True)  # after `suite.selection` has decided
def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of the set that runs, in each process, unless the command line names one."""
    if not OURS:
        return
    from suite.selection import SET  # not before pytest has loaded it as a plugin

    if settings is not None and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("full" if config.stash[SET].full else "fast")


@pytest.fixture(autouse=True)
def _subnormal_numbers() -> None:
    """Compute with subnormal numbers at the start of each test.

    A runtime that several tests share computes with zero in their place, in the process of all
    tests that come next.
    """
    torch = sys.modules.get("torch")
    if OURS and hasattr(torch, "set_flush_denormal"):
        torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="module")
def _records_of_plugins_before_a_module() -> Iterator[None]:
    """Have the same records of plugins after the tests of a module as before its fixtures."""
    yield from _same_records()


@pytest.fixture(autouse=True)
def _records_of_plugins() -> Iterator[None]:
    """Have the same records of plugins in the core's registries after each test as before it."""
    yield from _same_records()


def _same_records() -> Iterator[None]:
    name = "lmcore.plugin.registrations"
    before = sys.modules[name].added_records() if OURS and name in sys.modules else {}
    yield
    if OURS and name in sys.modules:
        sys.modules[name].restore_records(before)
