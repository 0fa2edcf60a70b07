"""Rendezvous: the processes of a run meet at its key-value store and exchange JSON values.

The store needs no communication backend, so that a process that cannot use its device can report
that, and a process that waits can name the missing ranks.  Tensors are exchanged by the process
group, see `lmcore.runtime.process.group`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmcore.base.errors import LmcoreError, OtherRankError, RunError, printable
from lmcore.base.threads import periodically
from lmcore.contract.device_errors import first_line
from lmcore.runtime.launch.rank import RankInfo, named_ranks
from lmcore.runtime.process.collective_trace import hanging_collectives, hanging_sends
from lmcore.runtime.process.watch import (
    FAILURES,
    LEFT,
    RankState,
    Watch,
    calls_of,
    collect_states,
    read_failure,
    show_states,
)
from lmcore.runtime.store import StoreClient, StoreError

__all__ = [
    "FAILURE_SECONDS",
    "NoAnswerError",
    "Rendezvous",
    "end_key",
    "error_fields",
]

logger = logging.getLogger(__name__)

_LEFT = "left"
_ALL_LEFT = "all left"
_NEVER = "never"
"""Key that is never set."""
_VERDICT_SECONDS = 5.0
"""Time that the other ranks wait longer than rank 0, which can name the missing ranks."""
_NUM_SHOWN = "lmcore/stacks-shown"
"""Key of the counter by which the first rank that shows all stacks is found."""
_HEARTBEAT_SECONDS = 1.0
"""Pause between two heartbeats of a working process, and between two checks for others'."""
_HEARTBEAT_LIMIT = 5.0
"""Time limit of a heartbeat, for which the end of the work waits."""
FAILURE_SECONDS = 2.0
"""Time that a process whose connection broke waits for the report of the rank that stopped."""
_MAX_NAMED = 8
_SENDS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv", "_wait_batch_p2p"})
"""Functions of torch that send or receive, which its flight recorder may not record."""
_LAST_SECONDS = 30.0
_LAST_SECONDS_AFTER_FAILURE = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """The connection of the processes of a run through the store.

    Attributes:
        rank: Rank of this process.
        timeout: Time limit of each exchange, in seconds.
        store: Store of the run, which also connects process groups.
        keeps_store: True if this process has the store, and must be the last to leave.
        store_owner: Process with the store, for messages.
        watch: Signs of life of this rank.
    """

    rank: RankInfo
    timeout: float
    store: StoreClient
    keeps_store: bool
    watch: Watch
    store_owner: str = "rank 0"
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _results: list[str] = field(default_factory=list, repr=False)

    def gather(self, value: Any, about: str = "an exchange") -> list[Any]:
        """Return every rank's JSON *value*, in the order of ranks; all ranks must call it.

        Args:
            value: JSON value of this rank.
            about: Subject of the exchange, for the message if a rank is missing.

        Raises:
            RunError: A rank stopped, did not answer within the timeout, or is in another exchange.
        """
        turn = next(self._turns)
        keys = [f"{turn}/{rank}" for rank in range(self.rank.world_size)]
        result = f"{turn}/all"
        call = self.watch.begin_call(about)
        with self.connection():
            self.store.set(keys[self.rank.rank], json.dumps([call, value]))
            if self.rank.rank == 0:
                self.wait_for(dict(enumerate(keys)), about)
                found = [json.loads(pair or b"[]") for pair in self.store.get_all(keys)]
                # A rank that has sent this value has read the last result.
                self.store.delete(*keys, *self._results)
                self._results[:] = [result]
                calls, values = [call for call, _ in found], [own for _, own in found]
                differ = len({(subject, number) for subject, number, _ in calls}) > 1
                self.store.set(result, json.dumps([calls if differ else None, values]))
            else:
                self.wait_for({0: result}, about)
                calls, values = self.read(result)
                differ = calls is not None
        if differ:
            raise _other_calls(calls)
        return values

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Raise the error of a lost store as an `OtherRankError`, as its process has ended."""
        try:
            yield
        except StoreError as cause:
            raise OtherRankError(
                f"the connection to {self.store_owner} is lost",
                why=first_line(cause),
                hint=f"{self.store_owner} has the store of the run: it may be stopped, or have "
                "died; look at its last lines",
            ) from cause

    def read(self, key: str) -> Any:
        """Return the JSON value at *key* of the store; null if there is none."""
        return json.loads(self.store.get(key) or b"null")

    def turn(self) -> int:
        """Return the number of a new exchange; all ranks must call it."""
        return next(self._turns)

    def barrier(self, about: str = "a barrier") -> None:
        """Wait until every rank has called it.

        Raises:
            RunError: A rank stopped, or did not call it within the timeout.
        """
        self.gather(None, about)

    @contextlib.contextmanager
    def first_process(self, about: str) -> Iterator[None]:
        """Let rank 0 run the block alone, then the other ranks; all ranks must call it.

        The other ranks wait as long as rank 0 sends heartbeats, however long the work takes.

        Args:
            about: Work of rank 0, for the message if its heartbeats end.

        Raises:
            RunError: Rank 0 stopped, or sent no heartbeat within the timeout.
        """
        turn = next(self._turns)
        done, heartbeats = f"{turn}/done", f"{turn}/beats"
        if self.rank.rank == 0:
            with self.connection(), self.heartbeats(heartbeats):
                yield
            self.store.set(done, "")
            return
        with self.connection():
            self.wait_for({0: done}, about, heartbeats={0: heartbeats})
        yield

    @contextlib.contextmanager
    def heartbeats(self, key: str) -> Iterator[None]:
        """Count up the number at *key* in the store, once a second, while the block runs."""
        store = self.store.within(min(_HEARTBEAT_LIMIT, self.timeout))

        def beat() -> None:
            with contextlib.suppress(StoreError):  # its process has ended, or is frozen
                store.add(key, 1)

        lost = "other ranks may take this one for dead after --distributed-timeout-minutes"
        with periodically(beat, _HEARTBEAT_SECONDS, name="lmcore-alive", without=lost):
            yield

    def wait_for(
        self,
        keys: Mapping[int, str],
        about: str,
        *,
        heartbeats: Mapping[int, str] | None = None,
        in_order: bool = True,
    ) -> None:
        """Wait until each rank has set its key in the store.

        The timeout of a rank starts again with each of its heartbeats.

        Args:
            keys: Key in the store by rank.
            about: Subject of the exchange, for the message if a rank is missing.
            heartbeats: Key in the store that each rank counts up while it works, by rank.
            in_order: False if a rank may begin, before it sets its key, collectives that this rank
                never begins.

        Raises:
            RunError: A rank stopped, or did not set its key within the timeout.
        """
        seconds = self.timeout + (0.0 if self.rank.rank == 0 else _VERDICT_SECONDS)
        names = list(keys.values())
        slice_seconds = min(_HEARTBEAT_SECONDS, seconds)
        deadlines = dict.fromkeys(keys, time.monotonic() + seconds)
        counts = dict.fromkeys(keys, -1)
        while not self.store.wait(names, slice_seconds, stop=FAILURES):
            failure = self.reported_failure()
            # Checked again: a rank that fails because of a value passes the value on first.
            if failure and not self.store.check(names):
                raise failure
            now = time.monotonic()
            for rank, key in (heartbeats or {}).items():
                count = self.store.add(key, 0)
                if count != counts[rank]:
                    counts[rank], deadlines[rank] = count, now + seconds
            missing = [
                rank
                for rank, key in keys.items()
                if now > deadlines[rank] and not self.store.check([key])
            ]
            if missing:
                raise self._missing(missing, about)
            ends = self.store.get_all([end_key(rank) for rank in keys])
            ended = [rank for rank, end in zip(keys, ends, strict=True) if end is not None]
            absent = [rank for rank in ended if not self.store.check([keys[rank]])]
            if absent:
                raise _ended(absent, self.rank.rank, about)
            if in_order and self.watch.check_order is not None:
                self.watch.check_order(keys, about)

    def show_states(self, error: BaseException) -> list[RankState] | None:
        """Print the Python stacks of all ranks, once in a run; None if the store does not answer.

        Args:
            error: Error of this rank, whose traceback is its stack.
        """
        try:
            store = self.store.within(FAILURE_SECONDS)
            states = collect_states(store, self.rank.world_size)
            is_first = store.add(_NUM_SHOWN, 1) == 1
        except StoreError:
            return None
        calls = calls_of(traceback.extract_tb(error.__traceback__))
        own = "\n".join(["main thread", *(f"  {call}" for call in calls)])
        states[self.rank.rank] = replace(states[self.rank.rank], stacks=own)
        if is_first:
            sys.stderr.write(f"{printable(show_states(states))}\n")
        return states

    def no_answer(self, error: BaseException) -> RunError:
        """Return the error of a collective that did not end in time; shows all ranks' stacks.

        Args:
            error: Error of the collective.
        """
        states = self.show_states(error)
        me = self.rank.rank
        what = f"a collective of rank {me} did not end within {self.timeout:g} s"
        where = f"rank {me} was in {_innermost_call(error)}"
        limit = "the limit is `--distributed-timeout-minutes`"
        if states is None:
            return RunError(
                what,
                why=f"{where}; {self.store_owner}, which has the store of the run, does not "
                "answer: its process is stopped or its host frozen",
                hint=f"look at the host of {self.store_owner}; {limit}",
            )
        silent = [rank for rank, state in enumerate(states) if state.silent]
        lines = [where]
        if silent:
            who = named_ranks(silent)
            what = f"no answer from {who}: {what}"
            lines.append(f"no answer from {who}: a stopped process or a frozen host")
        calls = traceback.extract_tb(error.__traceback__)
        counts = [state.operations for state in states]
        sends = any(call.name in _SENDS for call in calls)
        traces = [state.collectives for state in states]
        found = hanging_collectives(traces, counts, None if sends else me)
        lines += (hanging_sends(counts) if sends else found)[:_MAX_NAMED]
        lines += [
            f"rank {rank}: last seen in {states[rank].activity}" for rank in silent[:_MAX_NAMED]
        ]
        left = [rank for rank, state in enumerate(states) if state.left]
        lines += [f"{named_ranks(left)}: {LEFT}"] if left else []
        return RunError(
            what, why="\n".join(lines), hint=f"the Python stacks of all ranks are above; {limit}"
        )

    def _missing(self, ranks: Sequence[int], about: str) -> RunError:
        who = named_ranks(ranks)
        return NoAnswerError(
            f"{who} did not answer within {self.timeout:g} s",
            why=f"rank {self.rank.rank} of {self.rank.world_size} waited for {about}",
            hint=f"look at the last lines of {who}: dead, hanging, never started, or slow",
        )

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank stops; the first report counts."""
        report = {"rank": self.rank.rank, **error_fields(error)}
        with contextlib.suppress(StoreError):  # no other process is left
            self._soon().compare_set(FAILURES[0], "", json.dumps(report))

    def reported_failure(self, *, wait: float = 0.0) -> RunError | None:
        """Return the failure that another rank reported; None if there is none.

        Args:
            wait: Time to wait for a report, in seconds, if the connection has broken already.
        """
        report = None
        with contextlib.suppress(StoreError):  # the process with the store has ended
            store = self._soon()
            if wait:
                store.wait([_NEVER], wait, stop=FAILURES)
            report = read_failure(store)
        report = report or self.watch.failure
        return _stopped(json.loads(report)) if report else None

    def _soon(self) -> StoreClient:
        """Return the store for requests that a stopped process with the store must not delay."""
        return self.store.within(min(FAILURE_SECONDS, self.timeout))

    def leave(self, *, failed: bool) -> None:
        """Disconnect; the process with the store waits for others that may still read it."""
        seconds = _LAST_SECONDS_AFTER_FAILURE if failed else _LAST_SECONDS
        deadline = time.monotonic() + min(seconds, self.timeout)
        with contextlib.suppress(StoreError):  # the process with the store has ended
            store = self._soon()
            if store.add(_LEFT, 1) == self.rank.world_size:
                store.set(_ALL_LEFT, "")
            if self.keeps_store:
                store.wait([_ALL_LEFT], max(0.0, deadline - time.monotonic()))
        self.store.close()


class NoAnswerError(RunError):
    """A rank that did not take part in an exchange within the timeout."""


def end_key(rank: int) -> str:
    """Return the key that a rank sets when it takes part in no further exchange."""
    return f"ended/{rank}"


def _ended(ranks: Sequence[int], me: int, about: str) -> RunError:
    return RunError(
        f"{named_ranks(ranks)} ended, and rank {me} waits for {about}",
        why="exchanges are for all ranks",
        hint=f"look at the last lines of {named_ranks(ranks)}; a call within `if rank == 0` is a "
        "common cause",
    )


def _other_calls(calls: Sequence[tuple[str, int, str]]) -> RunError:
    """Return the error of calls that differ; see `Watch.begin_call`."""
    same_subject = len({subject for subject, _, _ in calls}) == 1
    ranks: dict[str, list[int]] = {}
    for rank, (subject, number, activity) in enumerate(calls):
        text = f"{subject}, call {number} for all ranks, at {activity}" if same_subject else subject
        ranks.setdefault(text, []).append(rank)
    return RunError(
        "the ranks make different calls at the same time",
        why="\n".join(f"{named_ranks(own)}: {subject}" for subject, own in ranks.items()),
        hint="all ranks must make the same calls in the same order; a call within `if rank == 0` "
        "is a common cause",
    )


def _stopped(report: Mapping[str, Any]) -> OtherRankError:
    text = f"{report['what']}\n{report['why']}" if report["why"] else report["what"]
    return OtherRankError(
        f"rank {report['rank']} stopped the run",
        why=f"it says: {text}",
        hint="its own output has the rest",
    )


def _innermost_call(error: BaseException) -> str:
    """Return the innermost call of lmcore in the traceback of *error*, and torch's that it made."""
    calls = traceback.extract_tb(error.__traceback__)
    ours = [index for index, call in enumerate(calls) if "lmcore" in Path(call.filename).parts]
    if not ours:
        return "an unknown call"
    call = calls[ours[-1]]
    text = f"`{call.name}` ({Path(call.filename).name}, line {call.lineno})"
    made = [call.name for call in calls[ours[-1] + 1 :] if call.name != "wrapper"]
    if len(made) > 1 and made[-1] != made[0]:
        return f"`{made[-1]}` within `{made[0]}`, called by {text}"
    return f"`{made[0]}`, called by {text}" if made else text


def error_fields(error: BaseException) -> dict[str, str | None]:
    """Return what, why and hint of an error, as JSON."""
    if isinstance(error, LmcoreError):
        return {"what": error.what, "why": error.why, "hint": error.hint}
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return {"what": message, "why": None, "hint": None}
