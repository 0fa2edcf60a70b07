"""Runs work on batches in threads or worker processes, with results in order.

Threads where the work leaves the interpreter free: nothing is copied, and they share what it
needs.  Processes where it holds the interpreter's lock.  They are spawned, never forked: a fork of
a process with threads may hang.  What only processes need is loaded with them.
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

from lmcore.child_process import exit_after
from lmcore.errors import ConfigError, RunError

__all__ = ["BatchWork", "work_ordered"]


class _Placed(Protocol):
    """Some documents, and where they come from."""

    @property
    def where(self) -> str: ...


_Batch = TypeVar("_Batch", bound=_Placed)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BatchWork(Generic[_Batch, _Result]):
    """What is done to each batch.

    Attributes:
        run: Does it; goes to each worker process once, with all that it holds.
        carried: What it holds that may refuse to go there, such as "the tokenizer `x`".
        done: What was being done to documents, for messages, such as "encoded".
    """

    run: Callable[[_Batch], _Result]
    carried: str
    done: str

    def pickled(self) -> bytes:
        """Return `run` as it is sent to a process."""
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
    """Yield what each batch gives, in the order of *batches*; close the iterator when done early.

    At most `2 * workers` batches are under way, so that memory stays bounded.

    Args:
        batches: The documents.
        work: What is done to them.
        workers: Number of threads or processes; one process is this one.
        threads: Which of the two; this one reads and writes meanwhile.

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
        run = _run
        pool = _processes(workers, work.pickled())
    try:
        yield from _in_order(pool, run, batches, depth=2 * workers, done=work.done)
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(workers: int, work: bytes) -> Executor:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work,),
    )


def _in_order(
    pool: Executor,
    run: Callable[[_Batch], _Result],
    batches: Iterable[_Batch],
    *,
    depth: int,
    done: str,
) -> Generator[_Result, None, None]:
    under_way: deque[tuple[_Batch, Future[_Result]]] = deque()
    try:
        for batch in batches:
            with _interrupts_held():
                under_way.append((batch, pool.submit(run, batch)))
            if len(under_way) >= depth:
                yield under_way[0][1].result()
                under_way.popleft()
        while under_way:
            yield under_way[0][1].result()
            under_way.popleft()
    except BrokenExecutor:
        places = [batch.where for batch, future in under_way if _is_lost(future)]
        raise RunError(
            f"a worker process died while it {done} documents",
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


def _is_lost(future: Future[Any]) -> bool:
    return not future.done() or future.exception() is not None


# The one work of a worker process: a pool's tasks have no other way to it than to carry it.
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
