"""Replicas of a model in other processes, which compute passes for rank 0.

Rank 0 has the requests, the results and all files.  It sends each replica whole passes through the
store of the run, so that a pass is the same as in one process, and so are its results, bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from lmcore.evaluation.likelihood import Likelihoods
from lmcore.evaluation.passes import AnyPass, Pass, Scored, SharedPass
from lmcore.evaluation.score import LogLikelihood

if TYPE_CHECKING:
    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.inference.load import LoadedModel
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["ReplicaPool", "Replicas", "first_ranks", "replica_pool", "replicas"]

_PASSES = "passes of an evaluation"
_BEATS = "evaluation/beats"
_W = TypeVar("_W")
_R = TypeVar("_R")


def first_ranks(layout: ParallelLayout) -> list[int]:
    """Return the rank of each replica that has the whole model for its callers.

    Args:
        layout: Sizes of the axes `tensor`, `pipeline` and `data`.
    """
    return [number * layout.tensor for number in range(layout.data)]


class Replicas:
    """Replicas that do passes at the same time; on rank 0.

    Attributes:
        size: Number of replicas, this one included.
    """

    def __init__(self, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        """Take the connection.

        Args:
            rendezvous: Connection to the other processes.
            ranks: First rank of each replica, rank 0 included.
        """
        self._rendezvous, self._ranks = rendezvous, ranks[1:]
        self.size = len(ranks)
        self._turn = 0

    def share(
        self,
        passes: Sequence[_W],
        own: Callable[[Sequence[_W]], list[_R]],
        encode: Callable[[_W], Any],
        decode: Callable[[Any], _R],
    ) -> list[_R]:
        """Return the result of each pass; replica i has each pass i + n * size.

        Args:
            passes: The passes.
            own: Function that computes passes here.
            encode: Function that returns a pass as a JSON value.
            decode: Function that returns the result of a replica's JSON value.

        Raises:
            RunError: A process stopped; with its message.
        """
        store, self._turn = self._rendezvous.store, self._turn + 1
        asked: dict[int, str] = {}
        with self._rendezvous.connection():
            for number, rank in enumerate(self._ranks, 1):
                given = [encode(one) for one in passes[number :: self.size]]
                store.set(_key(rank, "next"), json.dumps([self._turn, given]))
                asked[rank] = _key(rank, f"found/{self._turn}")
            found = dict(
                zip(range(0, len(passes), self.size), own(passes[:: self.size]), strict=True)
            )
            self._rendezvous.wait_for(asked, _PASSES, in_order=False)
            for number, key in enumerate(asked.values(), 1):
                places = range(number, len(passes), self.size)
                results = map(decode, self._rendezvous.read(key))
                found |= dict(zip(places, results, strict=True))
            store.delete(*asked.values())
        return [found[number] for number in range(len(passes))]

    def close(self) -> None:
        """Let the replicas end."""
        with self._rendezvous.connection():
            for rank in self._ranks:
                self._rendezvous.store.set(_key(rank, "next"), json.dumps(None))


@contextmanager
def replicas(
    rendezvous: Rendezvous, layout: ParallelLayout, compute: Callable[[list[Any]], list[Any]]
) -> Iterator[Replicas | None]:
    """Yield the replicas on rank 0; on the first ranks of others, None when rank 0 needs no more.

    Args:
        rendezvous: Connection of all processes.
        layout: Sizes of the axes `tensor`, `pipeline` and `data`.
        compute: Function that computes passes on other ranks, from JSON values to JSON values.

    Raises:
        RunError: A process stopped.
    """
    if rendezvous.rank.rank:
        _serve(compute, rendezvous)
        yield None
        return
    found = Replicas(rendezvous, first_ranks(layout))
    with rendezvous.connection(), rendezvous.heartbeats(_BEATS):
        yield found
        found.close()


class ReplicaPool:
    """Replicas that compute log-likelihoods; see `PassPool`."""

    def __init__(self, shared: Replicas) -> None:
        """Take the replicas."""
        self._shared = shared
        self.size = shared.size

    def compute(
        self,
        passes: Sequence[AnyPass],
        own: Callable[[Sequence[AnyPass]], list[list[LogLikelihood]]],
    ) -> list[list[LogLikelihood]]:
        """Return the results of the requests of each pass.

        Args:
            passes: The passes.
            own: Function that computes passes here.

        Raises:
            RunError: A process stopped; with its message.
        """
        return self._shared.share(passes, own, _record, _likelihoods)


@contextmanager
def replica_pool(
    loaded: LoadedModel, rendezvous: Rendezvous, layout: ParallelLayout
) -> Iterator[ReplicaPool | None]:
    """Yield the pool on rank 0; on the first ranks of other replicas, None when it is closed.

    Args:
        loaded: The model of this replica.
        rendezvous: Connection of all processes.
        layout: Sizes of the axes `tensor`, `pipeline` and `data`.

    Raises:
        RunError: A process stopped.
    """
    model = Likelihoods(loaded)

    def compute(given: list[Any]) -> list[Any]:
        found = model.compute([_pass(one) for one in given])
        return [[[one.logprob, one.greedy, one.tokens] for one in each] for each in found]

    served = model.ready() if rendezvous.rank.rank else nullcontext()
    with served, replicas(rendezvous, layout, compute) as shared:
        yield None if shared is None else ReplicaPool(shared)


def _serve(compute: Callable[[list[Any]], list[Any]], rendezvous: Rendezvous) -> None:
    """Compute the passes that rank 0 sends until it needs no more."""
    rank, store = rendezvous.rank.rank, rendezvous.store
    key = _key(rank, "next")
    with rendezvous.connection():
        while True:
            # However long rank 0 reads, it sends heartbeats.
            rendezvous.wait_for({0: key}, _PASSES, heartbeats={0: _BEATS}, in_order=False)
            message = rendezvous.read(key)
            store.delete(key)
            if message is None:
                return
            turn, given = message
            values = compute(given) if given else []
            store.set(_key(rank, f"found/{turn}"), json.dumps(values))


def _key(rank: int, name: str) -> str:
    return f"evaluation/{rank}/{name}"


def _record(one: AnyPass) -> list[Any]:
    """Return a pass as a JSON value."""
    requests = [[each.context, each.targets] for each in one.requests]
    return [isinstance(one, SharedPass), one.width, one.rows, requests]


def _likelihoods(values: Sequence[Sequence[Any]]) -> list[LogLikelihood]:
    """Return the results of a pass from a JSON value."""
    return [LogLikelihood(*one) for one in values]


def _pass(record: Sequence[Any]) -> AnyPass:
    """Return the pass of a JSON value."""
    shared, width, rows, requests = record
    made = tuple(Scored(tuple(context), tuple(targets)) for context, targets in requests)
    return SharedPass(made, width, rows) if shared else Pass(made, width, rows)
