"""Threads that a process can do without."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from lmcore.base.threads import has_lower_priority, lower_priority, read_ahead


class Item:
    """Something that a weak reference can observe."""


def test_items_come_in_order() -> None:
    assert list(read_ahead(range(5))) == [0, 1, 2, 3, 4]
    assert list(read_ahead([])) == []


def test_the_next_item_is_computed_while_the_caller_uses_one() -> None:
    computed = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(computed):
            event.set()
            yield number

    for number in read_ahead(items()):
        assert number == 2 or computed[number + 1].wait(30)


def test_at_most_two_items_exist() -> None:
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0

    def items() -> Iterator[Item]:
        nonlocal most
        for _ in range(5):
            item = Item()
            alive.add(item)
            most = max(most, len(alive))
            yield item
            del item

    for item in read_ahead(items()):
        del item
    assert most <= 2


def test_an_error_comes_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("damaged")

    taken = read_ahead(items())
    assert next(taken) == 1
    with pytest.raises(OSError, match="damaged"):
        next(taken)


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(read_ahead(range(3))) == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_thread_with_low_priority() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = priority(), []

    def note() -> None:
        found.append((priority(), os.sched_getscheduler(0), has_lower_priority()))

    def run() -> None:
        lower_priority()
        started = threading.Thread(target=note)
        started.start()
        started.join()
        note()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == 2 * [(19, os.SCHED_BATCH, True)]
    assert priority() == before
    assert not has_lower_priority()
