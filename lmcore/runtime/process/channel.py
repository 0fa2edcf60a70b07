"""`Channel`: exchanges of small notes in an order of their own, beside those of the rendezvous.

A thread may use one while the process goes on, as the writer of checkpoints does.  What fails on
one process fails on all of them, with its words; and nobody waits for one that has gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcore.errors import LmcoreError, OtherRankError
from lmcore.runtime.process.store import VERDICT_SECONDS, connection

if TYPE_CHECKING:
    from lmcore.runtime.process.store import Rendezvous

__all__ = ["Channel"]

_POLL_SECONDS = (0.001, 0.02)  # first and longest pause between two looks at the store
_BEAT_SECONDS = 1.0
"""Pause between two signs of life, and between two looks at those of others."""


class Channel:
    """All processes of a run; one thread of each uses a channel at a time.

    Attributes:
        rank: This process.
        world_size: How many there are.
    """

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        """Open it; all processes must open theirs in the same order.

        Args:
            rendezvous: The connection of the processes; None where this is the only one.
        """
        self._rendezvous = rendezvous
        self.rank = rendezvous.rank.rank if rendezvous else 0
        self.world_size = rendezvous.rank.world_size if rendezvous else 1
        self._name = f"channel{rendezvous.turn()}" if rendezvous else ""
        self._turns = itertools.count()
        self._answered: list[str] = []

    def exchange(
        self,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]],
        about: str,
        *,
        undo: Callable[[], None] = lambda: None,
    ) -> Any:
        """Do this process's part, and return what rank 0 makes of all parts for it.

        All processes must call it.  However long the work takes, others wait as long as there are
        signs of life.

        Args:
            work: This process's part; returns JSON.
            combine: On rank 0 only: gets the parts in the order of ranks, returns an answer for
                each, JSON too.
            about: What the exchange is about, for messages.
            undo: On rank 0 only, where anything failed, before the others hear of it.

        Raises:
            OtherRankError: Another process failed, with its words.
            RunError: Another process has gone, or did not answer within the timeout.
            BaseException: What *work* or *combine* raised here.
        """
        if self._rendezvous is None:
            try:
                return combine([work()])[0]
            except BaseException:
                undo()
                raise
        turn = f"{self._name}/{next(self._turns)}"
        if self.rank == 0:
            return self._lead(turn, work, combine, about, undo)
        with self._alive():
            failure, part = _attempt(work)
        if failure is None:
            return _opened(self._follow(turn, part, about))
        with contextlib.suppress(LmcoreError):  # this one's own failure matters more
            self._follow(turn, part, about)
        raise failure

    def _follow(self, turn: str, part: dict[str, Any], about: str) -> Any:
        """Give rank 0 this rank's part and return its answer."""
        assert self._rendezvous is not None
        store, answer = self._rendezvous.store, f"{turn}/answer{self.rank}"
        with connection(self.world_size):
            store.set(f"{turn}/{self.rank}", json.dumps(part))
            self._await({0: answer}, about, VERDICT_SECONDS)
            return json.loads(store.get(answer))

    def _lead(
        self,
        turn: str,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]],
        about: str,
        undo: Callable[[], None],
    ) -> Any:
        with self._alive():
            failure, own = _attempt(work)
            answers: Sequence[Any] = ()
            try:
                parts = [own, *self._collect(turn, about)]
                if failure is None:
                    # Of several, the one that is not the consequence of another.
                    answers = combine([_opened(part, rank) for rank, part in enumerate(parts)])
            except BaseException as error:  # noqa: BLE001 - told to the others, then raised
                failure = failure or error
            if failure is not None:
                undo()
                answers = [_told(failure)] * self.world_size
            else:
                answers = [{"value": answer} for answer in answers]
            self._answer(turn, answers)
        if failure is not None:
            raise failure
        return answers[0]["value"]

    def _collect(self, turn: str, about: str) -> list[Any]:
        """Return the parts of all ranks but this one."""
        assert self._rendezvous is not None
        store = self._rendezvous.store
        keys = {rank: f"{turn}/{rank}" for rank in range(1, self.world_size)}
        with connection(self.world_size):
            self._await(keys, about, 0.0)
            parts = [json.loads(store.get(key)) for key in keys.values()]
            # Whoever has come here has read the last answer.
            for key in (*keys.values(), *self._answered):
                store.delete_key(key)
        self._answered = []
        return parts

    def _answer(self, turn: str, answers: Sequence[Any]) -> None:
        assert self._rendezvous is not None
        with contextlib.suppress(RuntimeError):  # nobody is there to hear it
            for rank in range(1, self.world_size):
                key = f"{turn}/answer{rank}"
                self._rendezvous.store.set(key, json.dumps(answers[rank]))
                self._answered.append(key)

    def _await(self, keys: dict[int, str], about: str, more: float) -> None:
        """Wait until each rank has set its key, as long as it shows signs of life."""
        rendezvous = self._rendezvous
        assert rendezvous is not None
        store, seconds = rendezvous.store, rendezvous.timeout + more
        watch = _Watch(list(keys), seconds, lambda rank: int(store.add(self._beats(rank), 0)))
        pause, longest = _POLL_SECONDS
        while not store.check(list(keys.values())):
            heard = rendezvous.heard_failure()
            # Looked at again: who fails because of the notes hands them on before it says so.
            if heard and not store.check(list(keys.values())):
                raise heard
            silent = watch.silent(lambda rank: not store.check([keys[rank]]))
            if silent:
                raise rendezvous.late(silent, about)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _beats(self, rank: int) -> str:
        return f"{self._name}/beats{rank}"

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Show signs of life within the context."""
        over = threading.Event()
        assert self._rendezvous is not None
        store, key = self._rendezvous.store, self._beats(self.rank)

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # whoever kept the store has gone
                while not over.wait(_BEAT_SECONDS):
                    store.add(key, 1)

        thread = threading.Thread(target=beat, name="lmcore-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Watch:
    """Finds out which ranks have shown no sign of life for some time."""

    def __init__(self, ranks: Sequence[int], seconds: float, beats: Callable[[int], int]) -> None:
        now = time.monotonic()
        self._seconds, self._beats, self._looked = seconds, beats, now
        self._seen = dict.fromkeys(ranks, (-1, now + seconds))

    def silent(self, missing: Callable[[int], bool]) -> list[int]:
        """Return those of the missing ranks whose time is over; looks about once a second."""
        now = time.monotonic()
        if now < self._looked + min(_BEAT_SECONDS, self._seconds):
            return []
        self._looked, late = now, []
        for rank, (count, deadline) in self._seen.items():
            beats = self._beats(rank)
            if beats != count:
                self._seen[rank] = (beats, now + self._seconds)
            elif now > deadline and missing(rank):
                late.append(rank)
        return late


def _attempt(work: Callable[[], Any]) -> tuple[BaseException | None, dict[str, Any]]:
    """Return what the work raised, if anything, and what is said of it."""
    try:
        return None, {"value": work()}
    except BaseException as error:  # noqa: BLE001 - told to the others, then raised
        return error, _told(error)


def _told(error: BaseException) -> dict[str, Any]:
    if isinstance(error, _RelayedError):
        return {"failed": error.said}
    if isinstance(error, LmcoreError):
        return {"failed": {"what": error.what, "why": error.why, "hint": error.hint}}
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return {"failed": {"what": what, "why": None, "hint": None}}


class _RelayedError(OtherRankError):
    """What another process said, with its words."""

    def __init__(self, said: dict[str, Any]) -> None:
        place = "" if said.get("rank") is None else f"rank {said['rank']}: "
        super().__init__(f"{place}{said['what']}", why=said["why"], hint=said["hint"])
        self.said = said


def _opened(part: dict[str, Any], rank: int = 0) -> Any:
    """Return a value, or raise what *rank* said instead."""
    if "failed" in part:
        raise _RelayedError({"rank": rank, **part["failed"]})
    return part["value"]
