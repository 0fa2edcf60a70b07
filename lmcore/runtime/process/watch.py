"""Watch: work of each rank, and the Python stacks of all ranks when one does not answer.

A thread of each rank sends a sign of life to the store about once a second, with the step and the
number of collectives that the rank has begun.  A rank that waits in vain asks for the stacks of
all ranks: a frozen one sends none, and a late one shows where it is.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.threads import start_optional
from lmcore.runtime.launch.rank import named_ranks
from lmcore.runtime.launch.worker_protocol import FAILED
from lmcore.runtime.process.collective_trace import GroupTrace, count_operations, trace_collectives
from lmcore.runtime.store import StoreClient, StoreError

__all__ = [
    "FAILURES",
    "IDLE_THREADS",
    "LEFT",
    "STOP_THREAD",
    "RankState",
    "Watch",
    "calls_of",
    "collect_signs",
    "collect_states",
    "read_failure",
    "show_states",
]

_SECONDS, _RANKS = 1.0, 32
"""Seconds between two signs of life of a rank in a run of up to so many ranks; in proportion more
in larger runs, so that the process with the store has no more to do."""
_END_SECONDS = 2.0
"""Time to end the thread: the process with the store may not answer."""
_STACK_SECONDS = 3.0
"""Time that a rank has to send its stacks."""
_WANTED = "stacks/wanted"
_MAX_FRAMES = 24
_UNKNOWN = "unknown"
LEFT = "left the run before"
FAILURES = ("stopped", FAILED)
"""Keys in the store of the first failure: of a rank of this connection, and of the launcher."""
STOP_THREAD = "lmcore-stop"
IDLE_THREADS = frozenset(
    {
        *("lmcore-parent", "lmcore-store", "lmcore-alive", "lmcore-lock", "lmcore-watch"),
        *("lmcore-compiling", STOP_THREAD),
    }
)
"""Names of threads that do nothing that could hang the run."""


class Watch:
    """Thread that sends the signs of life of this rank, and its stacks when they are wanted.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        store: Store of the run.

    Attributes:
        activity: Function that returns the work of this rank, such as "step 7".
        failure: First failure, as JSON; None if there is none.  It is read early: the process with
            the store may end while this one is in a collective.
        over: Function that is called, in the thread, when another process has failed or the process
            with the store has ended; argument: the cause.
        check_order: Function that raises an error if other ranks wait for this one in a collective;
            arguments: the key in the store of each rank that this one waits for, and the subject
            of the exchange.  None: ranks may begin collectives in different orders.
    """

    def __init__(self, rank: int, world_size: int, store: StoreClient) -> None:
        self.activity: Callable[[], str] = str
        self.failure: bytes | None = None
        self.over: Callable[[str], None] = lambda cause: None
        self.check_order: Callable[[Mapping[int, str], str], None] | None = None
        self._call = (0, "")  # replaced at once, for the thread
        self._rank, self._store = rank, store
        self._seconds = _SECONDS * max(1.0, world_size / _RANKS)
        self._main = threading.get_ident()
        self._operations: dict[str, int] = {}
        self._sent = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send signs of life while the block runs; without a thread for them, it runs as well."""
        self._send_sign()
        thread = threading.Thread(target=self._run, name="lmcore-watch", daemon=True)
        lost = "this rank cannot show where it is if the run hangs"
        started = start_optional(thread, without=lost)
        if not started:  # not to be taken for a stopped rank
            answer = {"stacks": "unknown: no thread could be started", "collectives": {}}
            self._store.set(_stacks_key(self._rank), json.dumps(answer))
        try:
            yield
        finally:
            with contextlib.suppress(StoreError):
                self._store.within(_END_SECONDS).set(_end_key(self._rank), "")
            if started:
                thread.join(_END_SECONDS)

    def begin_call(self, subject: str) -> tuple[str, int, str]:
        """Note a call that waits for all ranks, in the store or a collective.

        If all ranks make the same calls in the same order, its number shows which rank is behind;
        not every communication backend counts its operations.

        Args:
            subject: Subject for messages, such as "`backward`".

        Returns:
            Subject, number of the call, 0 without `check_order`, and activity.
        """
        number = self._call[0] + (self.check_order is not None)
        self._call = (number, subject)
        return subject, number, self.activity()

    def is_behind(self, sign: Mapping[str, Any]) -> bool:
        """Return True if another rank has begun a later call, or another call in its place.

        Args:
            sign: Sign of life of the other rank.
        """
        (number, subject), (own, own_subject) = sign.get("call", (0, "")), self._call
        return bool(number > own or (number == own > 0 and subject != own_subject))

    def _run(self) -> None:
        try:
            self._send_signs()
        except StoreError:
            self.over("the end of the process with the store")

    def _send_signs(self) -> None:
        wanted = False
        while not self._store.wait(
            [_end_key(self._rank)],
            self._seconds,
            stop=[*([] if wanted else [_WANTED]), *([] if self.failure else FAILURES)],
        ):
            self._send_sign()
            if self.failure is None:
                self.failure = read_failure(self._store)
                if self.failure is not None:
                    self.over("the failure of another process")
            if not wanted and self._store.check([_WANTED]):
                wanted = True
                answer = {"stacks": _stacks(self._main), "collectives": trace_collectives()}
                self._store.set(_stacks_key(self._rank), json.dumps(answer))

    def _send_sign(self) -> None:
        # After an error the groups are destroyed before the ranks' states are compared.
        self._operations = count_operations() or self._operations
        self._sent += 1
        sign = {
            "activity": self.activity(),
            "operations": self._operations,
            "number": self._sent,
            "call": self._call,
        }
        self._store.set(f"watch/{self._rank}", json.dumps(sign))


@dataclass(frozen=True)
class RankState:
    """State of a rank of a run that hangs, as far as it is known.

    Attributes:
        activity: Work at its last sign of life, such as "step 7".
        operations: Number of operations that it had begun at that time, by process group.
        stacks: Its Python stacks, the main thread's first; None if it did not answer.
        collectives: Its last collectives by process group; None if it did not answer.
        left: True if its part of the run is over, and so it sends nothing.
    """

    activity: str
    operations: Mapping[str, int]
    stacks: str | None
    collectives: Mapping[str, GroupTrace] | None = None
    left: bool = False

    @property
    def silent(self) -> bool:
        """True if the rank is in the run and did not answer: stopped, or frozen."""
        return self.stacks is None and not self.left


def read_failure(store: StoreClient) -> bytes | None:
    """Return the report of the first failure, as JSON; None if there is none."""
    return next(filter(None, store.get_all(FAILURES)), None)


def collect_signs(store: StoreClient, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the last sign of life of each rank, with the keys of `Watch._send_sign`.

    Args:
        store: Store of the run.
        ranks: Ranks to read.

    Raises:
        StoreError: The process with the store does not answer.
    """
    signs = store.get_all([f"watch/{rank}" for rank in ranks])
    return {rank: json.loads(sign or b"{}") for rank, sign in zip(ranks, signs, strict=True)}


def collect_states(store: StoreClient, world_size: int) -> list[RankState]:
    """Return the state of each rank, with its stacks if it sends them in time.

    Raises:
        StoreError: The process with the store does not answer.
    """
    store.set(_WANTED, "")
    ranks = range(world_size)
    answer_keys = [_stacks_key(rank) for rank in ranks]
    store.wait(answer_keys, _STACK_SECONDS)
    signs = collect_signs(store, ranks)
    answers = store.get_all(answer_keys)
    ends = store.get_all([_end_key(rank) for rank in ranks])
    states = []
    for sign, own_answer, end in zip(signs.values(), answers, ends, strict=True):
        answer = json.loads(own_answer or b"{}")
        traces = answer.get("collectives")
        states.append(
            RankState(
                activity=sign.get("activity") or _UNKNOWN,
                operations=sign.get("operations") or {},
                stacks=answer.get("stacks"),
                collectives=None
                if traces is None
                else {key: GroupTrace(**trace) for key, trace in traces.items()},
                left=end is not None,
            )
        )
    return states


def show_states(states: Sequence[RankState]) -> str:
    """Return the states as text: equal stacks once, with their ranks."""
    groups: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        missing = LEFT if state.left else "no answer: stopped, or frozen"
        groups.setdefault(state.stacks or missing, []).append(rank)
    lines = []
    for stacks, ranks in groups.items():
        lines.append(f"{named_ranks(ranks)}:")
        lines += [f"  {line}" for line in stacks.splitlines()]
    return "\n".join(lines)


def _stacks_key(rank: int) -> str:
    return f"stacks/{rank}"


def _end_key(rank: int) -> str:
    return f"watch/{rank}/over"


def _stacks(main: int) -> str:
    """Return the Python stacks of this process: the thread *main* first, the latest call last.

    Threads that wait for something to do, as all but the main thread mostly are, are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):  # noqa: SLF001
        name = names.get(ident, str(ident))
        if ident == main:
            parts.append("main thread")
        elif ident == threading.get_ident() or name in IDLE_THREADS:
            continue
        else:
            parts.append(f"thread `{name}`")
        parts += [f"  {line}" for line in calls_of(traceback.extract_stack(frame))]
    return "\n".join(parts)


def calls_of(stack: traceback.StackSummary) -> list[str]:
    """Return a line for each of the innermost calls of a stack, the latest last."""
    calls = [call for call in stack if Path(call.filename).name != "threading.py"]
    return [f"{call.name} ({call.filename}, line {call.lineno})" for call in calls[-_MAX_FRAMES:]]
