"""SIGINT and SIGTERM as exceptions, and held back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lmcore.child_process import fork_child
from lmcore.signals import TERMINATED, TerminatedError, clean_termination, deferred_signals


def test_termination_is_an_exception() -> None:
    """SIGTERM leaves the block with the status of a shell; the handler is put back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError) as caught, clean_termination():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) is before


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
    assert os.waitstatus_to_exitcode(status) == TERMINATED
    assert capfd.readouterr().err == ""
