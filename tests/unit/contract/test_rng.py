"""Named streams of random numbers, on nothing but a device's three functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract import Device, RngTracker


def draw() -> list[float]:
    """Draw three numbers from the device's generator."""
    return torch.rand(3).tolist()


def seeded(seed: int) -> list[float]:
    """Return the first three numbers of a seed, from a new generator."""
    return torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def tracker(device: Device) -> RngTracker:
    """A tracker with streams `a` and `b`; the device's own is at seed 1."""
    torch.manual_seed(1)
    found = RngTracker(device)
    found.add("a", 7)
    found.add("b", 8)
    return found


def test_a_stream_begins_at_its_seed(tracker: RngTracker) -> None:
    """Numbers of a stream match a generator with its seed; the device's own continue."""
    with tracker.fork("a"):
        assert draw() == seeded(7)
    assert draw() == seeded(1)
    with tracker.fork("b"):
        assert draw() == seeded(8)
    assert tracker.names == ("a", "b")


def test_a_stream_goes_on_where_it_stopped(tracker: RngTracker) -> None:
    """Several visits together draw the numbers of one visit."""
    pieces = []
    for _ in range(4):
        with tracker.fork("a"):
            pieces.append(torch.rand(2))
        torch.rand(5)
    generator = torch.Generator().manual_seed(7)
    expected = torch.cat([torch.rand(2, generator=generator) for _ in range(4)])
    assert torch.equal(torch.cat(pieces), expected)


def test_streams_within_streams(tracker: RngTracker) -> None:
    """Entering streams within each other, the same one too, keeps each one's order."""
    generators = {name: torch.Generator().manual_seed(seed) for name, seed in (("a", 7), ("b", 8))}

    def expect(name: str) -> None:
        assert torch.equal(torch.rand(2), torch.rand(2, generator=generators[name]))

    with tracker.fork("a"):
        expect("a")
        with tracker.fork("a"):
            expect("a")
        with tracker.fork("b"):
            expect("b")
            with tracker.fork("a"):
                expect("a")
            expect("b")
        expect("a")
    assert draw() == seeded(1)


def test_an_error_inside_leaves_the_device_as_it_was(tracker: RngTracker) -> None:
    """The device's own numbers continue also when the visit ends in an error."""
    with pytest.raises(KeyError), tracker.fork("a"):  # noqa: PT012 - what happens inside is the test
        draw()
        raise KeyError("inside")
    assert draw() == seeded(1)


def test_states_come_back(tracker: RngTracker, device: Device) -> None:
    """States put into another tracker give the numbers that the first would have given."""
    with tracker.fork("a"):
        draw()
        states = tracker.states()  # also within a visit
        expected = draw()
    other = RngTracker(device)
    other.set_states(states)
    assert other.names == ("a", "b")
    with other.fork("a"):
        assert draw() == expected
    with tracker.fork("b"), pytest.raises(RuntimeError, match="`b` is being drawn from"):
        tracker.set_states(states)


def test_states_are_copies(tracker: RngTracker) -> None:
    """Changing what `states` returned changes no stream."""
    for state in tracker.states().values():
        state.zero_()
    with tracker.fork("a"):
        assert draw() == seeded(7)


@pytest.mark.parametrize("inside", [None, "a"])
def test_snapshot(tracker: RngTracker, inside: str | None) -> None:
    """`restored` repeats the numbers drawn after the snapshot, in every stream."""

    def everything() -> list[list[float]]:
        found = [draw()]
        for name in tracker.names:
            with tracker.fork(name):
                found.append(draw())
        return found

    def visit() -> tuple[object, object, object]:
        before = tracker.snapshot()
        first = everything()
        middle = tracker.snapshot()
        second = everything()
        tracker.restore(middle)
        with tracker.restored(before):
            assert everything() == first
        assert everything() == second
        return before, first, second

    if inside is None:
        visit()
    else:
        with tracker.fork(inside):
            visit()
        assert draw() == seeded(1)


def test_preserved(tracker: RngTracker) -> None:
    """Seeds, draws and exceptions inside do not change the numbers afterwards."""
    with pytest.raises(KeyError), tracker.preserved():  # noqa: PT012 - what happens inside is the test
        torch.manual_seed(99)
        with tracker.fork("b"):
            draw()
        raise KeyError("inside")
    assert draw() == seeded(1)
    with tracker.fork("b"):
        assert draw() == seeded(8)


def test_the_hosts_generator_of_another_device(device: Device) -> None:
    """The snapshot of a device other than the host holds both generators."""
    own = torch.Generator()
    chip = replace(
        device,
        type="meta",
        seed=own.manual_seed,
        get_rng_state=own.get_state,
        set_rng_state=own.set_state,
    )
    tracker = RngTracker(chip)
    torch.manual_seed(1)
    own.manual_seed(2)
    snapshot = tracker.snapshot()
    found = [(draw(), torch.rand(3, generator=own).tolist())]
    with tracker.restored(snapshot):
        found.append((draw(), torch.rand(3, generator=own).tolist()))
    assert found == [(seeded(1), seeded(2))] * 2


def test_names(tracker: RngTracker) -> None:
    """A second stream of a name, one without a name and an unknown one are refused."""
    for name in ("a", ""):
        with pytest.raises(ValueError, match="there are `a`, `b`"):
            tracker.add(name, 3)
    with pytest.raises(ValueError, match="no stream `c`"), tracker.fork("c"):
        pass


def test_a_device_brings_its_own(device: Device) -> None:
    """A device's own tracker is used, and what is none is refused; without one it is the core's."""

    class Own(RngTracker):
        pass

    assert type(device.rng_tracker()) is RngTracker
    assert type(replace(device, new_rng_tracker=lambda: Own(device)).rng_tracker()) is Own
    with pytest.raises(PluginError, match="to track its random numbers"):
        replace(device, new_rng_tracker=lambda: "a tracker").rng_tracker()


def test_verify_accepts_a_device_that_restores(device: Device) -> None:
    """A sound device passes, and its numbers are not disturbed by the proof."""
    torch.manual_seed(1)
    device.rng_tracker().verify()
    assert draw() == seeded(1)


def test_verify_refuses_a_device_that_does_not(device: Device) -> None:
    """A state that is accepted and not put back is an error at the start of the run."""
    deaf = replace(device, set_rng_state=lambda _state: None)
    with pytest.raises(DeviceError, match="does not restore") as caught:
        deaf.rng_tracker().verify()
    assert caught.value.why == "a restored state gave other numbers"


def test_verify_refuses_a_generator_that_never_advances(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that gives the same numbers for ever restores them, and is no generator."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(*shape))
    with pytest.raises(DeviceError) as caught:
        device.rng_tracker().verify()
    assert caught.value.why == "two draws in a row were equal"


class OnHost:
    """A device that draws from the host's generator, with a state that is its own or the host's."""

    type, torch_device = "chip", torch.device("cpu")

    def __init__(self, generator: torch.Generator) -> None:
        self.get_rng_state, self.set_rng_state = generator.get_state, generator.set_state

    def seed(self, number: int) -> None:
        """Seed nothing: no test draws from a seed."""


@pytest.mark.parametrize("dead", [False, True])
def test_verify_warns_of_numbers_that_are_the_hosts(
    dead: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A state that has no effect is hidden by the host's, which is restored with it."""
    torch.manual_seed(1)
    RngTracker(OnHost(torch.Generator() if dead else torch.default_generator)).verify()
    assert draw() == seeded(1)
    assert ("draws its random numbers from the host's generator" in caplog.text) == dead
