"""Fixtures for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from suite.warm import check_open, load_cpu_extension

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
    load_cpu_extension()
    # Processes that tests start without lmcore's launcher need not make one in the home directory.
    os.environ.setdefault("LMCORE_SECRET", "the secret of all runs of the tests")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Replace `os.fsync` in this process, as in processes that fork from `suite.warm`.

    No test cuts the power, and a third of a tiny run is spent in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check_open)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora, tokenizers and foreign files, `shared/data` beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder
