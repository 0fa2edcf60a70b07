"""Threads that a process can do without: it continues if the system has none left."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = [
    "has_lower_priority",
    "lower_priority",
    "map_in_threads",
    "periodically",
    "read_ahead",
    "start_optional",
]

_log = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def start_optional(thread: threading.Thread, *, without: str = "") -> bool:
    """Start *thread* and return True; return False if the system gives no more threads.

    Args:
        thread: Thread that is not started yet.
        without: Consequence for a warning if it cannot be started; empty for no warning.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:  # the error of Python, and of a full memory
        level = logging.WARNING if without else logging.DEBUG
        _log.log(level, "the thread `%s` cannot be started (%s): %s", thread.name, error, without)
        return False
    return True


def lower_priority() -> None:
    """Let other threads use the processor before the calling thread and the threads it starts.

    On Linux, where each thread has a priority; elsewhere nothing changes.  A thread of the class
    `SCHED_BATCH` does not interrupt another one when it wakes.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def has_lower_priority() -> bool:
    """Return True in a thread with a lower priority than the main thread of its process."""
    if sys.platform != "linux":
        return False
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return own > os.getpriority(os.PRIO_PROCESS, os.getpid())


@contextlib.contextmanager
def periodically(
    work: Callable[[], object], seconds: float, *, name: str, without: str
) -> Iterator[None]:
    """Call *work* in a daemon thread every *seconds* while the block runs.

    The block runs without these calls if the thread cannot be started.

    Args:
        work: Function without arguments; the thread ends if it raises.
        seconds: Time between two calls.
        name: Name of the thread.
        without: Consequence for the warning if the thread cannot be started.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    started = start_optional(thread, without=without)
    try:
        yield
    finally:
        over.set()
        if started:
            thread.join()


def map_in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int
) -> list[_Result]:
    """Return the result of *work* for each item, in order.

    The calling thread works, too, alone if the system gives no more threads.

    Args:
        work: Function of one item.
        items: The items.
        num_threads: Number of threads that work, the calling thread among them.

    Raises:
        BaseException: The error of the first item, in order, that failed.
    """
    waiting = list(enumerate(items))
    count = len(waiting)
    waiting.reverse()
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run() -> None:
        while not errors:
            try:
                index, item = waiting.pop()
            except IndexError:
                return
            try:
                results[index] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised on the calling thread
                errors[index] = error

    threads = [
        threading.Thread(target=run, daemon=True) for _ in range(min(num_threads, count) - 1)
    ]
    started = [thread for thread in threads if start_optional(thread)]
    run()
    for thread in started:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(count)]


def read_ahead(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield *items*; a thread computes the next item while the caller uses the current one.

    At most two items exist at a time.  Without a thread, if the system gives none, each item is
    computed when it is asked for.

    Args:
        items: The items, all computed in the same thread.

    Raises:
        BaseException: The error of the computation of an item, in its turn.
    """
    iterator = iter(items)

    def compute() -> list[_Item]:
        return list(itertools.islice(iterator, 1))

    with ThreadPoolExecutor(1, thread_name_prefix="lmcore-read-ahead") as pool:
        try:
            following: Future[list[_Item]] = pool.submit(compute)
        except (RuntimeError, MemoryError):  # as in `start_optional`
            yield from iterator
            return
        while current := following.result():
            following = pool.submit(compute)
            yield current.pop()  # no reference to it stays here
