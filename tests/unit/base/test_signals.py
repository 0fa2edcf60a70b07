"""Signals that end a run: as exceptions, and held back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from lmcore.base.child_process import fork_child
from lmcore.base.signals import (
    END_SIGNALS,
    TerminatedError,
    clean_termination,
    deferred_signals,
    end_word,
    raise_swallowed_signal,
)


@pytest.mark.parametrize(
    "number, status, word",
    [
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "terminated by SIGHUP"),
        (signal.SIGUSR1, 138, "terminated by SIGUSR1"),
        (signal.SIGUSR2, 140, "terminated by SIGUSR2"),
    ],
)
def test_termination_is_an_exception(number: signal.Signals, status: int, word: str) -> None:
    """The signal leaves the block with the status of a shell; the handler is put back."""
    before = signal.getsignal(number)
    with pytest.raises(TerminatedError) as caught, clean_termination():
        os.kill(os.getpid(), number)
    assert caught.value.code == status
    assert end_word(number) == word
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", END_SIGNALS)
def test_a_swallowed_signal(number: signal.Signals) -> None:
    """A module that catches every exception of its imports does not keep the run alive."""
    with pytest.raises((TerminatedError, KeyboardInterrupt)), clean_termination():  # noqa: PT012
        raise_swallowed_signal()
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        raise_swallowed_signal()
    with clean_termination():
        raise_swallowed_signal()  # none of this block


def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup` starts programs so that they survive a logout."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_termination(), deferred_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, TerminatedError)]
)
def test_deferred(number: int, error: type[BaseException]) -> None:
    """A signal within the block counts once, at its end."""
    done = []
    with clean_termination():
        before = signal.getsignal(number)
        with pytest.raises(error), deferred_signals():  # noqa: PT012
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append(1)
        assert done == [1]
        assert signal.getsignal(number) is before
        with deferred_signals():
            done.append(2)
    assert done == [1, 2]


def test_deferred_in_a_thread() -> None:
    """Only the main thread may change handlers; in others the block runs as it is."""
    done = []

    def work() -> None:
        with deferred_signals():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


def test_status_of_a_terminated_fork(capfd: pytest.CaptureFixture[str]) -> None:
    """A fork that SIGTERM ends before its program begins shows no traceback."""

    def work() -> int:
        with clean_termination():
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    _, status = os.waitpid(fork_child(work), 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert capfd.readouterr().err == ""
