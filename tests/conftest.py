"""Fixtures for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Handle signals again that the program which started pytest had ignored.

    A shell ignores SIGINT in the background, `nohup` SIGHUP, also in the processes that tests start
    and interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Processes that tests start without lmcore's launcher need not make one in the home directory.
    os.environ.setdefault("LMCORE_SECRET", "the secret of all runs of the tests")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora, tokenizers and foreign files, `shared/data` beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder
