"""Fixtures for every test."""

from __future__ import annotations

import os
import signal

from suite.fixtures import no_waiting_for_the_disk, one_trial_of_each_plugin, shared_data
from suite.warm import load_cpu_extension

__all__ = ["no_waiting_for_the_disk", "one_trial_of_each_plugin", "shared_data"]


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
