"""Signals that end an evaluation: the exception, and the line about what is kept."""

from __future__ import annotations

import os
import signal

import pytest

from lmcore.base.signals import TerminatedError
from lmcore.cli.evaluate.stop import said_at_stop, say_after_launcher


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_an_exception_with_the_line(number: signal.Signals, says: bool) -> None:
    kind = KeyboardInterrupt if number == signal.SIGINT else TerminatedError
    with pytest.raises(kind) as caught, said_at_stop("kept", says=says):
        os.kill(os.getpid(), number)
    assert getattr(caught.value, "__notes__", []) == (["kept"] if says else [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("status", [130, 143, 129, 0, 1, 2, 137])
def test_the_line_after_a_launcher(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """After Ctrl-C, SIGTERM or SIGHUP; a failure is no signal, and neither is being killed."""
    say_after_launcher("kept", status)
    assert capsys.readouterr().err == ("\nkept\n" if status in {130, 143, 129} else "")
