"""The clock of a step: the rank's own time is the step's time without the waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmcore.parallel.wait_clock import WaitClock


@pytest.fixture
def clock() -> WaitClock:
    """Return a clock that takes one second for each look at it, doubled each time."""

    def seconds() -> Iterator[float]:
        now, passed = 0.0, 1.0
        while True:
            yield now
            now, passed = now + passed, passed * 2

    return WaitClock(seconds().__next__)


def test_waits_are_left_out(clock: WaitClock) -> None:
    """Looks at 0, 1, 3, 7, 15 and 31 seconds: two waits of 2 and of 8 seconds."""
    clock.start()
    with clock:
        pass
    with clock:
        pass
    own = clock.stop()
    assert own() == 31 - 2 - 8


def test_a_wait_within_a_wait(clock: WaitClock) -> None:
    """The outer one counts, once."""
    clock.start()
    with clock, clock:
        pass
    assert clock.stop()() == 7 - 2


def test_work_within_a_wait(clock: WaitClock) -> None:
    """A pipeline's schedule waits, but for its passes, in which there may be other waits."""

    def work() -> str:
        with clock:
            pass
        return "done"

    clock.start()
    with clock:  # waits from 1 to 3, works, waits from 7 to 15, works, waits from 31 to 63
        assert clock.interrupted(work)() == "done"
    assert clock.stop()() == 127 - 2 - 8 - 32


def test_outside_of_a_step(clock: WaitClock) -> None:
    """Waits of a validation, before or after, count nowhere; an error ends a wait."""
    with clock:
        pass
    clock.start()
    with pytest.raises(ValueError, match="lost"), clock:
        raise ValueError("lost")
    own = clock.stop()
    with clock:
        assert clock.interrupted(lambda: 5)() == 5
    assert own() == 7 - 2
    clock.start()
    assert clock.stop()() > 0


def test_a_compiled_wait_is_plain() -> None:
    """The clock adds nothing to a compiled graph."""
    clock = WaitClock()

    def product(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = clock.wait(torch.mul, x, 2)
        return found

    clock.start()
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    clock.stop()
