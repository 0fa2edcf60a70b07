"""Why a run ends early."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.signals import END_SIGNALS
from lmcore.config.section import TrainingSection
from lmcore.train.due import Due
from lmcore.train.exit_conditions import ExitConditions

NOTHING = Due(
    log=False,
    validate=False,
    save=False,
    check_replicas=False,
    check_device=False,
    exit=False,
    last=False,
)


def test_interval() -> None:
    """The run ends where `--exit-interval` is due, and says so."""
    exits = ExitConditions(TrainingSection(exit_interval=5))
    due = dataclasses.replace(NOTHING, exit=True)
    assert exits.reason(10, due) == "step 10 is a multiple of --exit-interval 5"
    assert exits.reason(9, NOTHING) is None


def test_the_last_step() -> None:
    """After the last step the run is complete, unless a signal came."""
    exits = ExitConditions(TrainingSection(exit_interval=5, exit_duration_in_mins=1.0))
    exits.set_requests((0.0, 0.0, 1.0))
    assert exits.reason(10, dataclasses.replace(NOTHING, exit=True, last=True)) is None
    exits.set_requests((1.0, 1.0, 1.0))
    assert exits.reason(10, dataclasses.replace(NOTHING, last=True)) == "received SIGTERM"


def test_duration() -> None:
    """The run ends after the first step past `--exit-duration-in-mins`."""
    now = [100.0]
    exits = ExitConditions(TrainingSection(exit_duration_in_mins=1.5), clock=lambda: now[0])
    now[0] = 189.9
    assert exits.reason(1, NOTHING) is None
    now[0] = 190.0
    assert exits.reason(2, NOTHING) == "1.5 minutes have passed (--exit-duration-in-mins)"


def test_duration_counts_the_start_of_the_run() -> None:
    """The start of the run counts; the time to a checkpoint begins with the steps."""
    now = [100.0]
    training = TrainingSection(exit_duration_in_mins=1.5)
    exits = ExitConditions(training, save_minutes=1.0, elapsed=60.0, clock=lambda: now[0])
    now[0] = 129.9
    assert exits.reason(1, NOTHING) is None
    assert not exits.save_is_due(NOTHING)
    now[0] = 130.0
    assert exits.reason(2, NOTHING) == "1.5 minutes have passed (--exit-duration-in-mins)"


@pytest.mark.parametrize("number", END_SIGNALS)
def test_first_signal_asks(number: signal.Signals) -> None:
    """The first signal only requests the end of the run."""
    with ExitConditions(TrainingSection()) as exits:
        assert not exits.signalled
        os.kill(os.getpid(), number)
        assert exits.signalled
        assert exits.reason(3, NOTHING) == f"received {number.name}"


@pytest.mark.parametrize("number", END_SIGNALS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_signal_of_other_ranks_is_named(number: signal.Signals, count: int) -> None:
    """The reason names the signal, for any number of ranks that received it."""
    with ExitConditions(TrainingSection()) as other:
        os.kill(os.getpid(), number)
        requests = other.requests()
    exits = ExitConditions(TrainingSection())
    exits.set_requests(tuple(count * request for request in requests))
    assert exits.ending
    assert exits.reason(2, NOTHING) == f"received {number.name}"


def test_different_signals_of_other_ranks() -> None:
    """No signal is named that no rank received, whatever the mix of signals, in float32."""
    codes = []
    for number in END_SIGNALS:
        with ExitConditions(TrainingSection()) as other:
            os.kill(os.getpid(), number)
            codes.append(torch.tensor(other.requests()))
    exits = ExitConditions(TrainingSection())
    for first, second in itertools.permutations(codes, 2):
        for count in (1, 2, 3, 4, 6, 7, 15, 1000, 200_000):
            for more in (1, 2, 12, 1000, 200_000):
                requests = tuple((count * first + more * second).tolist())
                exits.set_requests(requests)
                assert exits.reason(2, NOTHING) == "received several signals", requests


def test_a_kill_switch_beside_a_signal_of_another_rank(tmp_path: Path) -> None:
    """The kill switch is named: it ends the run, too."""
    path = tmp_path / "stop"
    path.touch()
    main = ExitConditions(TrainingSection(kill_switch_path=str(path)))
    with ExitConditions(TrainingSection()) as other:
        os.kill(os.getpid(), signal.SIGUSR2)
        requests = other.requests()
    sums = torch.tensor(main.requests()) + 1000 * torch.tensor(requests)
    main.set_requests(tuple(sums.tolist()))
    assert main.reason(2, NOTHING) == f"the kill switch {path} exists"


def test_kill_switch(tmp_path: Path) -> None:
    """Rank 0 looks for it about once a second, and requests the end for all ranks."""
    now, path = [100.0], tmp_path / "stop"
    training = TrainingSection(kill_switch_path=str(path))
    main = ExitConditions(training, clock=lambda: now[0])
    other = ExitConditions(training, is_main_rank=False, clock=lambda: now[0])
    assert main.requests() == (0.0, 0.0, 0.0)
    path.touch()
    now[0] = 100.9
    assert main.reason(2, NOTHING) is None
    now[0] = 101.0
    assert main.reason(3, NOTHING) == f"the kill switch {path} exists"
    assert other.reason(3, NOTHING) is None
    other.set_requests(main.requests())
    assert other.ending
    assert other.reason(3, NOTHING) == f"the kill switch {path} exists"
    path.unlink()
    now[0] = 110.0
    assert main.requests()[0] == 1.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let signals count that come right after each other."""
    monkeypatch.setattr("lmcore.train.exit_conditions.SAME_SIGNAL_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_second_signal_gets_out() -> None:
    """A second SIGINT is the interpreter's own: KeyboardInterrupt."""
    with pytest.raises(KeyboardInterrupt), ExitConditions(TrainingSection()):  # noqa: PT012 - two signals
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_passed_on_twice_is_one() -> None:
    """A terminal and a launcher both pass on what the user sent once; the run ends in order."""
    with ExitConditions(TrainingSection()) as exits:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert exits.reason(3, NOTHING) == "received SIGINT"


def test_all_processes_end_for_one() -> None:
    """All processes end for a signal or the time limit of one."""
    exits = ExitConditions(TrainingSection(exit_duration_in_mins=1.0))
    exits.set_requests((1.0, 1.0, 0.0))
    assert exits.ending
    assert exits.reason(2, NOTHING) == "received SIGTERM"
    exits.set_requests((0.0, 0.0, 1.0))
    assert not exits.ending
    assert exits.reason(2, NOTHING) == "1 minutes have passed (--exit-duration-in-mins)"


def test_a_process_alone_waits_for_the_others() -> None:
    """Before the others know of a signal the run continues; it is in the next exchange."""
    with ExitConditions(TrainingSection()) as exits:
        exits.set_requests((0.0, 0.0, 0.0))
        os.kill(os.getpid(), signal.SIGTERM)
        assert exits.signalled
        assert exits.reason(3, NOTHING) is None
        assert exits.requests() == (1.0, 1.0, 0.0)


@pytest.mark.usefixtures("impatient")
def test_handlers_are_put_back() -> None:
    """After the run, and after the second signal, the handlers are those from before."""
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
            assert exits.received is signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_checkpoint_by_time() -> None:
    """A checkpoint is due so long after the last one; a request of any rank counts for all."""
    now = [0.0]
    exits = ExitConditions(TrainingSection(), save_minutes=1.0, clock=lambda: now[0])
    now[0] = 59.0
    assert not exits.save_is_due(NOTHING)
    now[0] = 60.0
    assert exits.save_is_due(NOTHING)
    assert exits.reason(3, NOTHING) is None
    exits.set_requests((0.0, 0.0, sum(exits.requests()[2] for _ in range(64))))
    exits.saved()
    assert not exits.save_is_due(NOTHING), "the sums are of a step before the save"
    now[0] = 119.0
    assert exits.requests() == (0.0, 0.0, 0.0)
    exits.set_requests((0.0, 0.0, 2.0**-20))
    assert exits.save_is_due(NOTHING), "it was due on another rank"
    assert not exits.save_is_due(dataclasses.replace(NOTHING, last=True))


def test_time_limit_before_checkpoint_by_time() -> None:
    """A run whose time is over exits, and saves therefore; it does not save twice."""
    now = [100.0]
    section = TrainingSection(exit_duration_in_mins=1.0)
    exits = ExitConditions(section, save_minutes=1.0, clock=lambda: now[0])
    assert ExitConditions(section, save_minutes=0.0).save_seconds is None
    now[0] = 170.0
    assert not exits.save_is_due(NOTHING)
    assert exits.reason(3, NOTHING) == "1 minutes have passed (--exit-duration-in-mins)"
    exits.set_requests((0.0, 0.0, 1.0 + 2.0**-20))
    assert not exits.save_is_due(NOTHING)
    exits.saved()
    assert exits.reason(3, NOTHING) is not None
