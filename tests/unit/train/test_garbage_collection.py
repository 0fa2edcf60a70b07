"""Garbage is collected between steps alone, and what stays is looked through once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lmcore.train.loop import GarbageCollection


class Cycle:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Python collects of itself before and after each test, and nothing is frozen."""
    assert gc.isenabled()
    gc.unfreeze()  # a command that ran in this process may have frozen what it had
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_at_the_interval() -> None:
    """Garbage stays until a step that is a multiple of the interval, and is gone after it."""
    with GarbageCollection(manual=True, interval=3) as garbage:
        garbage.on_step(1)
        assert not gc.isenabled()
        for first, last in ((2, 3), (4, 6)):
            left = weakref.ref(Cycle())
            for done in range(first, last):
                garbage.on_step(done)
                assert left() is not None
            garbage.on_step(last)
            assert left() is None


def test_freezes_once() -> None:
    """After the first collection nothing that was there then is looked through again."""
    with GarbageCollection(manual=True, interval=2) as garbage:
        garbage.on_step(1)
        assert gc.get_freeze_count() == 0
        garbage.on_step(2)
        assert gc.get_freeze_count() > 1000
        count = gc.get_freeze_count()
        garbage.on_step(4)
        assert abs(gc.get_freeze_count() - count) < 100


def test_never_between_steps() -> None:
    """At an interval of 0 nothing is collected."""
    with GarbageCollection(manual=True, interval=0) as garbage:
        left = weakref.ref(Cycle())
        for done in range(1, 5):
            garbage.on_step(done)
        assert not gc.isenabled()
        assert left() is not None


def test_left_to_python() -> None:
    """Asked not to, it changes nothing."""
    with GarbageCollection(manual=False, interval=1) as garbage:
        garbage.on_step(1)
        garbage.on_step(2)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0


def test_after_an_error() -> None:
    """Python collects again where a run has failed; where it did not before, it does not."""

    def fail() -> None:
        with GarbageCollection(manual=True, interval=2) as garbage:
            garbage.on_step(1)
            garbage.on_step(2)
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with GarbageCollection(manual=True, interval=2) as garbage:
            garbage.on_step(1)
        assert not gc.isenabled()
    finally:
        gc.enable()
