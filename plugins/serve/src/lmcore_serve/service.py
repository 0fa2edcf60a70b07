"""`Service`: a thread that generates the texts of all clients together.

The service has its own queue, so that the engine has only requests that run: after an error of a
pass the waiting ones continue with a new engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcore.base.errors import LmcoreError
from lmcore.generation.beam import BeamSearch
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.request import Continuation, Request
from lmcore.inference.parallel.driver import DividedModel, ProcessesError
from lmcore_serve.work import BeamRequest, EndReason, Update, Work

if TYPE_CHECKING:
    from lmcore.inference.load import LoadedModel

__all__ = ["ClosedError", "QueueFullError", "Service", "Statistics"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats


class QueueFullError(Exception):
    """A queue without room for further work."""


class ClosedError(Exception):
    """A service that takes no further work."""


@dataclass
class Statistics:
    """Totals of a service since its start.

    Attributes:
        prompt_tokens: Tokens of the prompts that were begun.
        generated_tokens: Tokens that were generated.
        ended: Number of texts for each reason of their end.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended: dict[EndReason, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Running:
    """Work with its continuation in the engine, and how much of it was reported."""

    work: Work
    continuation: Continuation
    characters: int = 0
    tokens: int = 0
    counted: int = 0
    prompt_reported: bool = False


@dataclass(eq=False)
class _Searching:
    """Work with its beam search."""

    work: Work
    search: BeamSearch


class Service:
    """Thread that runs an engine for many clients.

    All methods may be called by any thread.
    """

    def __init__(
        self, loaded: LoadedModel, *, max_running: int = 16, max_waiting: int = 128
    ) -> None:
        """Start the thread.

        Args:
            loaded: Model, which only this service uses.
            max_running: Number of texts that are generated together.
            max_waiting: Number of texts that may wait.
        """
        self._loaded = loaded
        self._max_running, self._max_waiting = max_running, max_waiting
        self._engine = self._new_engine()
        self._waiting: deque[Work] = deque()
        self._running: list[_Running] = []
        self._searching: _Searching | None = None
        self._cancelled: list[Work] = []
        self._statistics = Statistics()
        self._closing = self._drains = self._failed = False
        self._changed = threading.Condition()
        self._stepped = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lmcore-service", daemon=True)
        self._thread.start()

    def submit(self, works: Sequence[Work]) -> None:
        """Queue all of some work, or none.

        Raises:
            QueueFullError: The queue has no room for it.
            ClosedError: The service is closed.
        """
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise ClosedError
            free = max(self._max_running - self.num_running, 0) + self._max_waiting
            if len(self._waiting) + len(works) > free:
                raise QueueFullError
            if not self._has_work:
                self._stepped = time.monotonic()
            self._waiting.extend(works)
            self._changed.notify()

    def cancel(self, works: Sequence[Work]) -> None:
        """End some work soon; without effect on work that has ended."""
        with self._changed:
            self._cancelled.extend(works)
            self._changed.notify()

    def close(self, timeout: float | None = None) -> bool:
        """Take no further work, finish what there is, and end the thread.

        Args:
            timeout: Time in seconds after which the rest is cancelled; None: no limit.

        Returns:
            True if all work was finished, and the thread has ended.
        """
        with self._changed:
            self._closing = self._drains = True
            self._changed.notify()
        self._thread.join(timeout)
        drained = not self._thread.is_alive()
        with self._changed:
            self._drains = False
            self._changed.notify()
        self._thread.join(timeout)
        return drained and not self._thread.is_alive()

    def end_all(self) -> int:
        """Take no further work, and end soon what there is; return the number of its texts."""
        with self._changed:
            self._closing = True
            self._drains = False
            self._changed.notify()
            return self.num_running + self.num_waiting

    @property
    def max_texts(self) -> int:
        """Number of texts that the service can have at a time."""
        return self._max_running + self._max_waiting

    @property
    def num_running(self) -> int:
        """Number of texts that are being generated."""
        return len(self._running) + (self._searching is not None)

    @property
    def num_waiting(self) -> int:
        """Number of texts in the queue."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """True while the thread runs, and the processes of the model work together."""
        return self._thread.is_alive() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """True if no text can be generated any more, though nobody closed the service."""
        model = self._loaded.model
        return self._failed or (isinstance(model, DividedModel) and model.failed)

    @property
    def seconds_without_step(self) -> float:
        """Time since the last finished step, or since there is work; 0 without work."""
        return time.monotonic() - self._stepped if self._has_work else 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._searching)

    @property
    def statistics(self) -> Statistics:
        """Copy of the totals since the start."""
        with self._changed:
            now = self._statistics
            return Statistics(now.prompt_tokens, now.generated_tokens, dict(now.ended))

    def _new_engine(self) -> ContinuousBatch:
        return ContinuousBatch(
            self._loaded.model,
            vocab_size=self._loaded.tokenizer.vocab_size,
            max_requests=self._max_running,
            execution=self._loaded.execution,
        )

    def _run(self) -> None:
        try:
            while self._take_changes():
                self._step()
                self._stepped = time.monotonic()
        except ProcessesError as error:
            # The cause is in the messages of the process that ended.
            logger.error("no text can be generated any more: %s", error.what_and_why)  # noqa: TRY400
            self._fail(error)
        except BaseException as error:
            logger.exception("the thread of generation failed")
            self._fail(error if isinstance(error, Exception) else None)

    def _take_changes(self) -> bool:
        """Wait for work, begin and cancel some; return False at the end of the service."""
        with self._changed:
            while not (self._waiting or self._running or self._searching or self._closing):
                self._cancelled.clear()
                self._changed.wait()
            cancelled, self._cancelled = self._cancelled, []
            gone = [one for one in self._waiting if one in cancelled]
            late = [one for one in self._waiting if one not in gone and _is_late(one)]
            if gone or late:
                kept = (one for one in self._waiting if one not in gone and one not in late)
                self._waiting = deque(kept)
            if self._closing and not self._drains:
                gone += self._waiting
                self._waiting.clear()
            begun = self._next_works()
            stop_all = self._closing and not self._drains
            more = bool(begun or self._running or self._searching)
        for work in gone:
            self._report(work, Update(end="cancelled"))
        for work in late:
            self._report(work, Update(end="timeout"))
        self._end_running(cancelled, all_of_them=stop_all)
        for work in begun:
            try:
                self._begin(work)
            except Exception as error:
                logger.exception("a text could not be begun")
                self._report(work, Update(end="error", error=error))
        return more or not self._closing

    def _next_works(self) -> list[Work]:
        """Take work from the queue, in order, as long as there is room."""
        room = self._max_running - self.num_running
        searches = self._searching is not None
        begun: list[Work] = []
        left: deque[Work] = deque()
        for work in self._waiting:
            is_search = isinstance(work.request, BeamRequest)
            # The memory of a beam search is that of many texts: one at a time.
            if len(begun) >= room or (is_search and searches):
                left.append(work)
            else:
                begun.append(work)
                searches = searches or is_search
        self._waiting = left
        return begun

    def _end_running(self, cancelled: Sequence[Work], *, all_of_them: bool) -> None:
        """End running work that was cancelled, or whose deadline has passed."""
        for running in list(self._running):
            work = running.work
            if all_of_them or work in cancelled:
                self._end(running, "cancelled")
            elif _is_late(work):
                self._end(running, "timeout")
        searching = self._searching
        if searching is None:
            return
        if all_of_them or searching.work in cancelled:
            self._searching = None
            self._report(searching.work, Update(end="cancelled"))
        elif _is_late(searching.work):
            self._searching = None
            self._report(searching.work, Update(end="timeout"))

    def _begin(self, work: Work) -> None:
        request = work.request
        with self._changed:
            self._statistics.prompt_tokens += request.num_prompt_tokens
        if isinstance(request, Request):
            self._running.append(_Running(work, self._engine.add(request)))
            return
        search = BeamSearch(
            self._loaded.model,
            request.prompt,
            width=request.width,
            max_tokens=request.max_tokens,
            vocab_size=self._loaded.tokenizer.vocab_size,
            stop_tokens=request.stop_tokens,
            length_penalty=request.length_penalty,
            execution=self._loaded.execution,
        )
        self._searching = _Searching(work, search)

    def _step(self) -> None:
        """Generate the next token of everything that runs, and report it."""
        if self._running:
            try:
                self._engine.step()
            except ProcessesError:
                raise  # no new engine could continue
            except Exception as error:
                logger.exception("a pass of the model failed")
                running, self._running = self._running, []
                self._engine = self._new_engine()
                for one in running:
                    self._report(one.work, Update(end="error", error=error))
        for one in list(self._running):
            try:
                self._report_progress(one)
            except Exception as error:  # noqa: BLE001 - logged and reported
                self._drop(one, error)
        if self._searching is not None:
            self._step_search(self._searching)

    def _step_search(self, searching: _Searching) -> None:
        work, search = searching.work, searching.search
        try:
            search.step()
            beams = tuple(search.best()) if search.ended else ()
        except ProcessesError:
            raise
        except Exception as error:
            logger.exception("a step of beam search failed")
            self._searching = None
            self._report(work, Update(end="error", error=error))
            return
        if search.ended:
            self._searching = None
            with self._changed:
                self._statistics.generated_tokens += len(beams[0].tokens)
            end: EndReason = "stop" if beams[0].finished else "length"
            self._report(work, Update(end=end, beams=beams))

    def _report_progress(self, running: _Running) -> None:
        """Report what is new of a text, if its client wants it already."""
        continuation, work = running.continuation, running.work
        made = len(continuation.tokens)
        if made > running.counted:
            with self._changed:
                self._statistics.generated_tokens += made - running.counted
            running.counted = made
        if continuation.error is not None:
            self._drop(running, continuation.error)
        elif continuation.finish_reason is not None:
            self._end(running, continuation.finish_reason)
        elif work.streams and made > running.tokens:
            self._report(work, self._new_part(running))

    def _end(self, running: _Running, reason: EndReason) -> None:
        """Report the rest of a text, and its end."""
        self._engine.cancel(running.continuation)
        self._running.remove(running)
        completion = running.work.completion
        if completion is not None:
            completion.finish(running.continuation.tokens)
        self._report(running.work, self._new_part(running, reason))

    def _drop(self, running: _Running, error: Exception) -> None:
        """End a text with an error."""
        if not isinstance(error, LmcoreError):
            logger.error("a text could not be generated", exc_info=error)
        self._engine.cancel(running.continuation)
        if running in self._running:
            self._running.remove(running)
        self._report(running.work, Update(end="error", error=error))

    def _new_part(self, running: _Running, end: EndReason | None = None) -> Update:
        """Return what was not reported yet."""
        continuation, completion = running.continuation, running.work.completion
        text = completion.text if completion is not None else ""
        start, running.characters = running.characters, len(text)
        first, running.tokens = running.tokens, len(continuation.tokens)
        prompt = () if running.prompt_reported else tuple(continuation.prompt_logprobs)
        running.prompt_reported = True
        return Update(
            text[start:],
            tuple(continuation.tokens[first:]),
            tuple(continuation.logprobs[first:]),
            prompt,
            end,
            stopped_by=completion.stopped_by if completion is not None else None,
            stop_token=continuation.stop_token,
            stop_logprob=continuation.stop_logprob,
        )

    def _report(self, work: Work, update: Update) -> None:
        if update.end is not None:
            with self._changed:
                ended = self._statistics.ended
                ended[update.end] = ended.get(update.end, 0) + 1
        try:
            work.on_update(update)
        except Exception:
            logger.exception("a client's function failed")

    def _fail(self, error: Exception | None) -> None:
        """Report an error to all work, after a failure of the thread."""
        with self._changed:
            self._closing = self._failed = True
            waiting = [*self._waiting]
            self._waiting.clear()
        works = [*waiting, *(one.work for one in self._running)]
        if self._searching is not None:
            works.append(self._searching.work)
        for work in works:
            self._report(work, Update(end="error", error=error))


def _is_late(work: Work) -> bool:
    return work.deadline is not None and time.monotonic() >= work.deadline
