"""End of a session: all ranks end together, or a rank that waits in a collective is named."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lmcore.errors import RunError
from lmcore.runtime.launch.rank import named_ranks
from lmcore.runtime.process.collective_trace import count_operations
from lmcore.runtime.process.rendezvous import end_key
from lmcore.runtime.process.watch import collect_signs

if TYPE_CHECKING:
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["end_together"]

_POLL_SECONDS = 1.0


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
    own = count_operations()
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
            waiting = [
                rank
                for rank, sign in signs.items()
                if any(
                    count > own.get(group, count)
                    for group, count in (sign.get("operations") or {}).items()
                )
            ]
            if waiting:
                raise _in_vain(me, updates, {rank: signs[rank] for rank in waiting})
            if signs != seen:
                seen, deadline = signs, time.monotonic() + rendezvous.timeout
            if time.monotonic() > deadline:
                raise RunError(
                    f"{named_ranks(missing)} did not end within {rendezvous.timeout:g} s",
                    why=f"rank {me} has ended its loop, and waits",
                    hint=f"look at the last lines of {named_ranks(missing)}",
                )
            rendezvous.store.wait([keys[rank] for rank in missing], _POLL_SECONDS)


def _in_vain(me: int, updates: int, signs: dict[int, Any]) -> RunError:
    lines = [f"rank {me} has ended after {updates} updates of weights"]
    lines += [
        f"rank {rank} waits in a collective at {sign.get('activity') or 'an unknown step'}"
        for rank, sign in signs.items()
    ]
    return RunError(
        f"rank {me} has ended, and {named_ranks(list(signs))} waits for it",
        why="\n".join(lines),
        hint="give all ranks the same number of batches: `rt.loader` does; collectives and `save` "
        "are for all ranks, outside `if rt.rank == 0`",
    )
