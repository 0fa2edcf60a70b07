"""Runs a segment over batches, in worker processes where there are several, with results in order.

As in `lmcore.data.worker_pool` workers are spawned, never forked: a fork of a process with threads
may hang.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait

from lmcore.data.clean.work import AnyBatch, Processed, Segment, process
from lmcore.errors import ConfigError, RunError

__all__ = ["process_ordered"]


def process_ordered(
    batches: Iterable[AnyBatch], segment: Segment, *, workers: int
) -> Generator[Processed, None, None]:
    """Yield what each batch gives, in the order of *batches*; close the iterator when done early.

    At most `2 * workers` batches are under way, so that memory stays bounded.

    Raises:
        RunError: A worker process died.
        ConfigError: A step cannot be sent to another process.
    """
    if workers == 1:
        for batch in batches:
            yield process(batch, segment)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(_pickled(segment),),
    )
    try:
        yield from _in_order(pool, batches, depth=2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterable[AnyBatch], *, depth: int
) -> Generator[Processed, None, None]:
    under_way: deque[tuple[str, Future[Processed]]] = deque()
    try:
        for batch in batches:
            with _interrupts_held():
                under_way.append((batch.where, pool.submit(_process, batch)))
            if len(under_way) >= depth:
                yield under_way[0][1].result()
                under_way.popleft()
        while under_way:
            yield under_way[0][1].result()
            under_way.popleft()
    except BrokenProcessPool:
        places = [where for where, future in under_way if _is_lost(future)]
        raise RunError(
            "a worker process died while it cleaned documents",
            why=f"under way were {', '.join(places[:4]) or 'the first documents'}",
            hint="the system ends processes when memory runs out: try fewer `--workers`, "
            "or look for a huge document there",
        ) from None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back: processes started meanwhile inherit this and leave it to the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_lost(future: Future[Processed]) -> bool:
    return not future.done() or future.exception() is not None


def _pickled(segment: Segment) -> bytes:
    try:
        return pickle.dumps(segment)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            "a step cannot be sent to worker processes", why=str(error), hint="use `--workers 1`"
        ) from None


# The one segment of a worker process: a pool's tasks have no other way to it than to carry it.
_worker: list[Segment] = []


def _start_worker(pickled: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(pickle.loads(pickled))  # noqa: S301  # made by the parent process


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _process(batch: AnyBatch) -> Processed:
    return process(batch, _worker[0])
