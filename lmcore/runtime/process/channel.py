"""Channel: exchanges of JSON values, independent of the rendezvous and its order.

A thread may use a channel while the process continues, as the writer of checkpoints does.  A
failure of one process fails on all of them, with its text.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import LmcoreError, OtherRankError
from lmcore.runtime.process.rendezvous import error_fields
from lmcore.runtime.store import StoreError

if TYPE_CHECKING:
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["Channel"]


class Channel:
    """Connection of all processes of a run; one thread of each uses a channel at a time.

    Attributes:
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        """Open a channel; all processes must open theirs in the same order.

        Args:
            rendezvous: Connection of the processes; None if this is the only process.
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
        """Do this process's part, and return the answer that rank 0 computes from all parts.

        All processes must call it.  They wait as long as the working processes send heartbeats,
        however long the work takes.

        Args:
            work: Part of this process; returns JSON.
            combine: Called on rank 0 with the parts in the order of ranks; returns an answer for
                each rank, also JSON.
            about: Subject of the exchange, for messages.
            undo: Called on rank 0 after a failure, before the other ranks learn of it.

        Raises:
            OtherRankError: Another process failed, with its text.
            RunError: Another process has ended, or did not answer within the timeout.
            BaseException: The error that *work* or *combine* raised here.
        """
        if self._rendezvous is None:
            try:
                return combine([work()])[0]
            except BaseException:
                undo()
                raise
        turn = f"{self._name}/{next(self._turns)}"
        self._rendezvous.watch.begin_call(about)
        if self.rank == 0:
            return self._lead(turn, work, combine, about, undo)
        with self._rendezvous.heartbeats(self._beats(self.rank)):
            failure, part = _attempt(work)
        if failure is None:
            return _opened(self._follow(turn, part, about))
        with contextlib.suppress(LmcoreError):  # this one's own failure matters more
            self._follow(turn, part, about)
        raise failure

    def _follow(self, turn: str, part: dict[str, Any], about: str) -> Any:
        """Send this rank's part to rank 0 and return its answer."""
        assert self._rendezvous is not None
        answer = f"{turn}/answer{self.rank}"
        with self._rendezvous.connection():
            self._rendezvous.store.set(f"{turn}/{self.rank}", json.dumps(part))
            self._rendezvous.wait_for({0: answer}, about, heartbeats={0: self._beats(0)})
            return self._rendezvous.read(answer)

    def _lead(
        self,
        turn: str,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]],
        about: str,
        undo: Callable[[], None],
    ) -> Any:
        assert self._rendezvous is not None
        with self._rendezvous.heartbeats(self._beats(0)):
            failure, own = _attempt(work)
            answers: Sequence[Any] = ()
            try:
                parts = [own, *self._collect(turn, about)]
                if failure is None:
                    # Raises the first failure that is not the consequence of another.
                    answers = combine([_opened(part, rank) for rank, part in enumerate(parts)])
            except BaseException as error:  # noqa: BLE001 - sent to the other ranks, then raised
                failure = failure or error
            if failure is not None:
                undo()
                answers = [_failed(failure)] * self.world_size
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
        with self._rendezvous.connection():
            beats = {rank: self._beats(rank) for rank in keys}
            self._rendezvous.wait_for(keys, about, heartbeats=beats)
            parts = [self._rendezvous.read(key) for key in keys.values()]
            # A rank that has sent this part has read its last answer.
            store.delete(*keys.values(), *self._answered)
        self._answered = []
        return parts

    def _answer(self, turn: str, answers: Sequence[Any]) -> None:
        assert self._rendezvous is not None
        with contextlib.suppress(StoreError):  # no other process is left
            for rank in range(1, self.world_size):
                key = f"{turn}/answer{rank}"
                self._rendezvous.store.set(key, json.dumps(answers[rank]))
                self._answered.append(key)

    def _beats(self, rank: int) -> str:
        return f"{self._name}/beats{rank}"


def _attempt(work: Callable[[], Any]) -> tuple[BaseException | None, dict[str, Any]]:
    """Return the error of *work*, if any, and the part to send."""
    try:
        return None, {"value": work()}
    except BaseException as error:  # noqa: BLE001 - sent to the other ranks, then raised
        return error, _failed(error)


def _failed(error: BaseException) -> dict[str, Any]:
    """Return the part of a process that failed."""
    return {"failed": error.fields if isinstance(error, _RelayedError) else error_fields(error)}


class _RelayedError(OtherRankError):
    """An error of another process, with its text."""

    def __init__(self, fields: dict[str, Any]) -> None:
        rank = "" if fields.get("rank") is None else f"rank {fields['rank']}: "
        super().__init__(f"{rank}{fields['what']}", why=fields["why"], hint=fields["hint"])
        self.fields = fields


def _opened(part: dict[str, Any], rank: int = 0) -> Any:
    """Return the value of a part, or raise the error of *rank*."""
    if "failed" in part:
        raise _RelayedError({"rank": rank, **part["failed"]})
    return part["value"]
