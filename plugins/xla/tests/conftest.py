"""Makes the plugin importable from its sources where it is not installed; PJRT's CPU client."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("lmcore_xla") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from lmcore.contract import Device, ProbeState
from lmcore_xla.plugin import lmcore_launch_env
from lmcore_xla.probe import CHOICE, HOST, probe, read_facts


@pytest.fixture(scope="session")
def pjrt() -> None:
    """PJRT's CPU client; the test is skipped where torch_xla is not installed or does not fit."""
    found = probe(read_facts(), {CHOICE: HOST})
    if found.state is not ProbeState.PRESENT:
        pytest.skip(f"{'; '.join(found.evidence)}: see `tox -e xla`")
    os.environ |= lmcore_launch_env(found)


@pytest.fixture(scope="session")
def device(pjrt: None) -> Device:
    """The device of this process."""
    from lmcore_xla.device import create_device

    return create_device(probe(read_facts(), {CHOICE: HOST}))
