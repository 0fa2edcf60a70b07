"""Signals that end an evaluation: the exception, and the line about what is kept."""

from __future__ import annotations

import os
import signal

import pytest

from lmcore.base.signals import TerminatedError
from lmcore.cli.evaluate.stop import ended_by_signal, said_at_stop


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_an_exception_with_the_line(number: signal.Signals, says: bool) -> None:
    kind = KeyboardInterrupt if number == signal.SIGINT else TerminatedError
    with pytest.raises(kind) as caught, said_at_stop("kept", says=says):
        os.kill(os.getpid(), number)
    assert getattr(caught.value, "__notes__", []) == (["kept"] if says else [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_status_of_a_launcher() -> None:
    """130 after Ctrl-C, 143 after SIGTERM; a failure is no signal."""
    assert [ended_by_signal(status) for status in (130, 143, 129, 0, 1, 2, 137)] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
