"""Errors that name the ranks of a session that would wait for each other until the timeout."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import RunError, counted
from lmcore.runtime.launch.rank import named_ranks
from lmcore.runtime.process.collective_trace import count_operations, hanging_collectives
from lmcore.runtime.process.rendezvous import end_key
from lmcore.runtime.process.watch import collect_signs, collect_states

if TYPE_CHECKING:
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["check_order", "end_together"]

_POLL_SECONDS = 1.0
_REPLICAS = "data"
"""Name of the group in which the library itself reduces gradients."""


def end_together(rendezvous: Rendezvous, updates: int) -> None:
    """Wait until all ranks end; all ranks must call it.

    Before its call a rank may work alone for any time.  A rank that has begun a collective would
    wait forever for a rank that has ended.

    Args:
        rendezvous: Connection of the processes.
        updates: Number of updates of weights by this rank, for messages.

    Raises:
        RunError: A rank waits in a collective, or a rank sends no signs of life within the timeout.
    """
    me, size = rendezvous.rank.rank, rendezvous.rank.world_size
    keys = {rank: end_key(rank) for rank in range(size)}
    rendezvous.watch.begin_call("the end of the session")
    with rendezvous.connection():
        rendezvous.store.set(keys[me], "")
        seen: dict[int, Any] = {}
        deadline = time.monotonic() + rendezvous.timeout
        while True:
            missing = [rank for rank, key in keys.items() if not rendezvous.store.check([key])]
            if not missing:
                return
            failure = rendezvous.reported_failure()
            if failure:
                raise failure
            signs = collect_signs(rendezvous.store, missing)
            waiting = _ahead(signs, rendezvous)
            if waiting:
                raise _waits_for_ended(me, updates, {rank: signs[rank] for rank in waiting})
            if signs != seen:
                seen, deadline = signs, time.monotonic() + rendezvous.timeout
            if time.monotonic() > deadline:
                raise RunError(
                    f"{named_ranks(missing)} did not end within {rendezvous.timeout:g} s",
                    why=f"rank {me} has ended its loop, and waits",
                    hint=f"look at the last lines of {named_ranks(missing)}",
                )
            rendezvous.store.wait([keys[rank] for rank in missing], _POLL_SECONDS)


def check_order(rendezvous: Rendezvous, keys: Mapping[int, str], about: str) -> None:
    """Raise an error if a rank for which this one waits has begun a later collective.

    In a program whose ranks make the same calls in the same order, no rank is ahead of one that
    waits for it: both would wait until the timeout.

    Args:
        rendezvous: Connection of the processes.
        keys: Key in the store by rank, for which this rank waits.
        about: Subject of the exchange.

    Raises:
        RunError: There is such a rank.
    """
    store = rendezvous.store
    missing = [rank for rank, key in keys.items() if not store.check([key])]
    signs = collect_signs(store, missing)
    ahead = _ahead(signs, rendezvous)
    ahead = [rank for rank in ahead if not store.check([keys[rank]])]  # later than its sign
    if not ahead:
        return
    me = rendezvous.rank.rank
    states = collect_states(store, rendezvous.rank.world_size)
    traces = [state.collectives for state in states]
    lines = [f"rank {me}: waits for {about}, at {states[me].activity}"]
    lines += [f"rank {rank}: {_place(signs[rank])}" for rank in ahead]
    lines += hanging_collectives(traces, [state.operations for state in states], None)
    raise RunError(
        f"rank {me} is in {about}, and {named_ranks(ahead)} waits for it in another call",
        why="\n".join(lines),
        hint="all ranks must make the same calls in the same order, and leave an epoch at the same "
        "batch; a call within `if rank == 0` is a common cause",
    )


def _ahead(signs: Mapping[int, Mapping[str, Any]], rendezvous: Rendezvous) -> list[int]:
    """Return the ranks that have begun calls or collectives that this rank has not.

    In the default group and groups of the script, ranks may also send to single other ranks, which
    is counted as a collective is; and not every backend counts.
    """
    own = count_operations()
    return [
        rank
        for rank, sign in signs.items()
        if rendezvous.watch.is_behind(sign)
        or any(
            count > own.get(group, count)
            for group, count in (sign.get("operations") or {}).items()
            if group.partition(" ")[2] == _REPLICAS
        )
    ]


def _place(sign: Mapping[str, Any]) -> str:
    """Return the call that a rank waits in, and its update, by its sign of life."""
    activity = sign.get("activity") or "an unknown step"
    return f"waits in {sign.get('call', (0, ''))[1] or 'a collective'} at {activity}"


def _waits_for_ended(me: int, updates: int, signs: dict[int, Any]) -> RunError:
    lines = [f"rank {me} has ended after {counted(updates, 'update')} of weights"]
    lines += [f"rank {rank} {_place(sign)}" for rank, sign in signs.items()]
    return RunError(
        f"rank {me} has ended, and {named_ranks(list(signs))} waits for it",
        why="\n".join(lines),
        hint="give all ranks the same number of batches: `rt.loader` does; collectives and `save` "
        "are for all ranks, outside `if rt.rank == 0`",
    )
