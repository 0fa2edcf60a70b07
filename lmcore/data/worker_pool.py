"""Runs the encoding of batches in threads or worker processes, with results in order.

Threads where the encoding leaves the interpreter free: nothing is copied, and they share one
tokenizer.  Processes where it holds the interpreter's lock.  They are spawned, never forked: a
fork of a process with threads may hang.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait

from lmcore.data.encode import Encoded, EncodePlan, encode_batch
from lmcore.data.input.batch import Batch
from lmcore.data.tokenizer import Tokenizer
from lmcore.errors import ConfigError, RunError

__all__ = ["encode_ordered"]


def encode_ordered(
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    plan: EncodePlan,
    *,
    workers: int,
    threads: bool = False,
) -> Generator[Encoded, None, None]:
    """Yield what each batch gives, in the order of *batches*; close the iterator when done early.

    At most `2 * workers` batches are under way, so that memory stays bounded.

    Args:
        batches: The documents.
        tokenizer: Makes the ids.
        plan: What the workers need besides.
        workers: Number of threads or processes; one process is this one.
        threads: Which of the two.

    Raises:
        RunError: A worker process died.
        ConfigError: The tokenizer cannot be sent to another process.
    """
    if threads:
        yield from _in_threads(batches, tokenizer, plan, workers)
        return
    if workers == 1:
        for batch in batches:
            yield encode_batch(batch, tokenizer, plan)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(_pickled(tokenizer, plan),),
    )
    try:
        yield from _in_order(pool, _encode, batches, depth=2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_threads(
    batches: Iterable[Batch], tokenizer: Tokenizer, plan: EncodePlan, workers: int
) -> Generator[Encoded, None, None]:
    """Encode in threads; this one reads and writes meanwhile."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    encode = functools.partial(encode_batch, tokenizer=tokenizer, plan=plan)
    try:
        yield from _in_order(pool, encode, batches, depth=2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: Executor,
    encode: Callable[[Batch], Encoded],
    batches: Iterable[Batch],
    *,
    depth: int,
) -> Generator[Encoded, None, None]:
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            with _interrupts_held():
                under_way.append((batch, pool.submit(encode, batch)))
            if len(under_way) >= depth:
                yield under_way[0][1].result()
                under_way.popleft()
        while under_way:
            yield under_way[0][1].result()
            under_way.popleft()
    except BrokenProcessPool:
        places = [batch.where for batch, future in under_way if _is_lost(future)]
        raise RunError(
            "a worker process died while it encoded documents",
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


def _is_lost(future: Future[Encoded]) -> bool:
    return not future.done() or future.exception() is not None


def _pickled(tokenizer: Tokenizer, plan: EncodePlan) -> bytes:
    try:
        return pickle.dumps((tokenizer, plan))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the tokenizer `{tokenizer.name}` cannot be sent to worker processes",
            why=str(error),
            hint="use `--workers 1`",
        ) from None


# The one tokenizer of a worker process: a pool's tasks have no other way to it than to carry it.
_worker: list[tuple[Tokenizer, EncodePlan]] = []


def _start_worker(pickled: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(pickle.loads(pickled))  # noqa: S301  # made by the parent process


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode(batch: Batch) -> Encoded:
    tokenizer, plan = _worker[0]
    return encode_batch(batch, tokenizer, plan)
