"""Pool of threads or worker processes that works on batches, with results in order.

Threads are for work that releases the GIL: they share its data without a copy.  Processes are for
work that holds the GIL.  They are spawned, not forked: a fork of a process with threads may hang.
"""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lmcore.base.child_process import exit_after
from lmcore.base.errors import ConfigError, RunError

__all__ = ["BatchWork", "work_ordered"]


class _Placed(Protocol):
    """Batch of documents, with its location in the input for messages."""

    @property
    def where(self) -> str: ...


_Batch = TypeVar("_Batch", bound=_Placed)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BatchWork(Generic[_Batch, _Result]):
    """Work on each batch.

    Attributes:
        run: Function of a batch; it is pickled to each worker process once.
        carried: Name of the object in *run* that may not be picklable, such as "the tokenizer
            `x`", for messages.
        done: Verb in the past tense for messages, such as "encoded".
    """

    run: Callable[[_Batch], _Result]
    carried: str
    done: str

    def pickled(self) -> bytes:
        """Return *run* as pickled bytes.

        Raises:
            ConfigError: *run* cannot be pickled.
        """
        try:
            return pickle.dumps(self.run)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.carried} cannot be sent to worker processes",
                why=str(error),
                hint="use `--workers 1`",
            ) from None


def work_ordered(
    batches: Iterable[_Batch],
    work: BatchWork[_Batch, _Result],
    *,
    workers: int,
    threads: bool = False,
) -> Generator[_Result, None, None]:
    """Yield the result of each batch, in the order of *batches*.

    At most `2 * workers` batches are in flight, so that memory stays bounded.  Close the iterator
    to stop early.

    Args:
        batches: Batches of documents.
        work: The work on each batch.
        workers: Number of threads or processes.  One process means this process.
        threads: True for threads, False for processes.

    Raises:
        RunError: A worker process died.
        ConfigError: The work cannot be sent to another process.
    """
    if workers == 1 and not threads:
        yield from map(work.run, batches)
        return
    pool: Executor
    run: Callable[[_Batch], _Result] = work.run
    if threads:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="worker")
    else:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        run = _run
        pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(work.pickled(),),
        )
    try:
        yield from _in_order(pool, run, batches, depth=2 * workers, done=work.done)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: Executor,
    run: Callable[[_Batch], _Result],
    batches: Iterable[_Batch],
    *,
    depth: int,
    done: str,
) -> Generator[_Result, None, None]:
    in_flight: deque[tuple[_Batch, Future[_Result]]] = deque()
    try:
        for batch in batches:
            with _block_interrupts():
                in_flight.append((batch, pool.submit(run, batch)))
            if len(in_flight) >= depth:
                yield in_flight[0][1].result()
                in_flight.popleft()
        while in_flight:
            yield in_flight[0][1].result()
            in_flight.popleft()
    except BrokenExecutor:
        lost = [
            batch.where
            for batch, future in in_flight
            if not future.done() or future.exception() is not None
        ]
        raise RunError(
            f"a worker process died while it {done} documents",
            why=f"in progress: {', '.join(lost[:4]) or 'the first documents'}",
            hint="the system kills processes when memory runs out: try fewer `--workers`, "
            "or look for a huge document there",
        ) from None


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C: processes started inside inherit the mask and leave it to the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The work of a worker process; the list keeps it between the tasks of a pool.
_worker: list[Callable[[Any], Any]] = []


def _start_worker(pickled: bytes) -> None:
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        exit_after(lambda: wait([parent.sentinel]))
    _worker.append(pickle.loads(pickled))  # noqa: S301  # made by the parent process


def _run(batch: Any) -> Any:
    return _worker[0](batch)
