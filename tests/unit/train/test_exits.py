"""Why a run ends early."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from lmcore.config.section import TrainingSection
from lmcore.train.exits import ExitConditions


def test_interval() -> None:
    """The run ends at each multiple of `--exit-interval`, and says so."""
    exits = ExitConditions(TrainingSection(exit_interval=5))
    assert [step for step in range(1, 12) if exits.reason(step)] == [5, 10]
    assert exits.reason(10) == "step 10 is a multiple of --exit-interval 5"
    assert ExitConditions(TrainingSection()).reason(5) is None


def test_duration() -> None:
    """The run ends after the first step past `--exit-duration-in-mins`."""
    now = [100.0]
    exits = ExitConditions(TrainingSection(exit_duration_in_mins=1.5), clock=lambda: now[0])
    now[0] = 189.9
    assert exits.reason(1) is None
    now[0] = 190.0
    assert exits.reason(2) == "1.5 minutes have passed (--exit-duration-in-mins)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks(number: signal.Signals) -> None:
    """The first SIGTERM or SIGINT only asks the run to end."""
    with ExitConditions(TrainingSection()) as exits:
        assert not exits.told_to_stop
        os.kill(os.getpid(), number)
        assert exits.told_to_stop
        assert exits.reason(3) == f"received {number.name}"


def test_second_signal_gets_out() -> None:
    """A second SIGINT is the interpreter's own: KeyboardInterrupt."""
    with pytest.raises(KeyboardInterrupt), ExitConditions(TrainingSection()):  # noqa: PT012 - two signals
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    """After the run, and after the first signal, the handlers are those from before."""
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with ExitConditions(TrainingSection()):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        with ExitConditions(TrainingSection()) as exits:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
            assert exits.received == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
