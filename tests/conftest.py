"""Fixtures for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Hear SIGINT again where a shell started pytest in the background.

    Such a shell has it ignored, also in the processes that tests start and interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that tests start without lmcore's launcher need not make one in the home directory.
    os.environ.setdefault("LMCORE_SECRET", "the secret of all runs of the tests")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora, tokenizers and foreign files, `shared/data` beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder
