"""Rendezvous: the processes of a run meet at torch's key-value store and exchange JSON values.

The store needs no communication backend, so that a process that cannot use its device can report
that, and a process that waits can name the missing ranks.  Tensors are exchanged by the process
group, see `lmcore.runtime.process.group`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lmcore.errors import ConfigError, LmcoreError, OtherRankError, RunError
from lmcore.runtime.launch.rank import AGENT_STORE, RankInfo, named_ranks
from lmcore.runtime.launch.worker_protocol import launch_info
from lmcore.threads import periodically

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

__all__ = ["Rendezvous", "connection", "error_fields", "join_processes"]

logger = logging.getLogger(__name__)

_FAILED = "failed"
_LEFT = "left"
_POLL_SECONDS = (0.001, 0.02)  # first and longest pause between two reads of the store
_VERDICT_SECONDS = 5.0
"""Time that the other ranks wait longer than rank 0, which is the one that can name who is missing.
"""
_HEARTBEAT_SECONDS = 1.0
"""Pause between two heartbeats of a working process, and between two checks for others'."""
_FAILURE_SECONDS = 2.0
"""Time that a process whose connection broke waits for the report of the rank that stopped."""
_LOST_PEER_MESSAGES = ("onnection closed by peer", "onnection reset by peer", "roken pipe")
_LAST_SECONDS = 30.0
_LAST_SECONDS_AFTER_FAILURE = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """The connection of the processes of a run through the store.

    Attributes:
        rank: Rank of this process.
        timeout: Time limit of each exchange, in seconds.
        store: torch's store, which also connects process groups.
    """

    rank: RankInfo
    timeout: float
    store: Store
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def gather(self, value: Any, about: str = "an exchange") -> list[Any]:
        """Return every rank's JSON *value*, in the order of ranks; all ranks must call it.

        Args:
            value: JSON value of this rank.
            about: Subject of the exchange, for the message if a rank is missing.

        Raises:
            RunError: A rank stopped, or did not answer within the timeout.
        """
        turn = next(self._turns)
        keys = [f"{turn}/{rank}" for rank in range(self.rank.world_size)]
        result = f"{turn}/all"
        with connection(self.rank.world_size):
            self.store.set(keys[self.rank.rank], json.dumps(value))
            if self.rank.rank == 0:
                self.wait_for(dict(enumerate(keys)), about)
                values = [json.loads(self.store.get(key)) for key in keys]
                self.store.set(result, json.dumps(values))
                return values
            self.wait_for({0: result}, about)
            found: list[Any] = json.loads(self.store.get(result))
            return found

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
            with connection(self.rank.world_size), self.heartbeats(heartbeats):
                yield
            self.store.set(done, "")
            return
        with connection(self.rank.world_size):
            self.wait_for({0: done}, about, heartbeats={0: heartbeats})
        yield

    @contextlib.contextmanager
    def heartbeats(self, key: str) -> Iterator[None]:
        """Count up the number at *key* in the store, once a second, while the block runs."""

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the process with the store has gone
                self.store.add(key, 1)

        lost = "other ranks may take this one for dead after --distributed-timeout-minutes"
        with periodically(beat, _HEARTBEAT_SECONDS, name="lmcore-alive", without=lost):
            yield

    def wait_for(
        self,
        keys: Mapping[int, str],
        about: str,
        *,
        heartbeats: Mapping[int, str] | None = None,
    ) -> None:
        """Wait until each rank has set its key in the store.

        The timeout of a rank starts again with each of its heartbeats.

        Args:
            keys: Key in the store by rank.
            about: Subject of the exchange, for the message if a rank is missing.
            heartbeats: Key in the store that each rank counts up while it works, by rank.

        Raises:
            RunError: A rank stopped, or did not set its key within the timeout.
        """
        seconds = self.timeout + (0.0 if self.rank.rank == 0 else _VERDICT_SECONDS)
        checked = time.monotonic()
        deadlines = dict.fromkeys(keys, checked + seconds)
        counts = dict.fromkeys(keys, -1)
        pause, longest = _POLL_SECONDS
        while not self.store.check(list(keys.values())):
            failure = self.reported_failure()
            # Checked again: a rank that fails because of a value passes the value on first.
            if failure and not self.store.check(list(keys.values())):
                raise failure
            now = time.monotonic()
            if heartbeats and now >= checked + min(_HEARTBEAT_SECONDS, seconds):
                checked = now
                for rank, key in heartbeats.items():
                    count = int(self.store.add(key, 0))
                    if count != counts[rank]:
                        counts[rank], deadlines[rank] = count, now + seconds
            missing = [
                rank
                for rank, key in keys.items()
                if now > deadlines[rank] and not self.store.check([key])
            ]
            if missing:
                raise self._missing(missing, about)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _missing(self, ranks: Sequence[int], about: str) -> RunError:
        who = named_ranks(ranks)
        return RunError(
            f"{who} did not answer within {self.timeout:g} s",
            why=f"rank {self.rank.rank} of {self.rank.world_size} waited for {about}",
            hint=f"look at the last lines of {who}: dead, hanging, never started, or slow",
        )

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank stops; the first report counts."""
        report = {"rank": self.rank.rank, **error_fields(error)}
        with contextlib.suppress(RuntimeError):  # no other process is left
            self.store.compare_set(_FAILED, "", json.dumps(report))

    def reported_failure(self, *, wait: float = 0.0) -> RunError | None:
        """Return the failure that another rank reported; None if there is none.

        Args:
            wait: Time to wait for a report, in seconds, if the connection has broken already.
        """
        deadline = time.monotonic() + wait
        with contextlib.suppress(RuntimeError):  # the process with the store has gone
            while True:
                if self.store.check([_FAILED]):
                    return _stopped(json.loads(self.store.get(_FAILED)))
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_SECONDS[1])
        return None

    def leave(self, *, failed: bool) -> None:
        """Disconnect; the process with the store waits for others that may still read it."""
        seconds = _LAST_SECONDS_AFTER_FAILURE if failed else _LAST_SECONDS
        deadline = time.monotonic() + min(seconds, self.timeout)
        with contextlib.suppress(RuntimeError):  # the process with the store has gone before
            self.store.add(_LEFT, 1)
            while self.rank.rank == 0 and time.monotonic() < deadline:
                if self.store.add(_LEFT, 0) >= self.rank.world_size:
                    return
                time.sleep(_POLL_SECONDS[1])


@contextlib.contextmanager
def join_processes(
    rank: RankInfo, *, timeout: float, env: Mapping[str, str] = os.environ
) -> Iterator[Rendezvous]:
    """Connect this process with the other ranks of its run, until the block ends.

    An exception that leaves the block stops the other ranks at their next exchange, with its text.

    Args:
        rank: Rank of this process.
        timeout: Time limit for the other processes, here and in every exchange, in seconds.
        env: Environment with MASTER_ADDR and MASTER_PORT; torchrun says there if it has the store.

    Raises:
        ConfigError: The address is missing or wrong.
        RunError: Other processes cannot be reached, or did not all connect.
    """
    rendezvous = Rendezvous(rank, timeout, _store(rank, timeout, env))
    failed = True
    try:
        rendezvous.barrier("all processes of the run to start")
        yield rendezvous
        failed = False
    except RuntimeError as error:  # of torch: a collective whose other side has gone
        failure = rendezvous.reported_failure(wait=_FAILURE_SECONDS) or _lost_peer(error)
        if failure:
            raise failure from error
        rendezvous.report_failure(error)
        raise
    except BaseException as error:
        rendezvous.report_failure(error)
        raise
    finally:
        rendezvous.leave(failed=failed)


def _store(rank: RankInfo, timeout: float, env: Mapping[str, str]) -> Store:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as above

    host, port = _address(rank, env)
    # torchrun's own store outlives the processes, which are all its clients.
    agent = env.get(AGENT_STORE) == "True"
    keeps = rank.rank == 0 and not agent
    try:
        store = TCPStore(
            host,
            port,
            is_master=keeps,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # `barrier` waits, and can say for whom
            multi_tenant=True,
            master_listen_fd=launch_info(env).listening_fd if keeps else None,
        )
    except RuntimeError as cause:
        does = "listen" if keeps else "reach torchrun's store" if agent else "reach rank 0"
        hint = (
            f"if torchrun did not start this process, unset {AGENT_STORE}"
            if agent
            else "MASTER_ADDR must be a host of the run that all others reach, where rank 0 is, "
            "and MASTER_PORT a free port there"
        )
        raise RunError(
            f"rank {rank.rank} of {rank.world_size} cannot {does} at {host}:{port}",
            why=_first_line(cause),
            hint=hint,
        ) from cause
    return PrefixStore("lmcore", store)


def _address(rank: RankInfo, env: Mapping[str, str]) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name, "").strip()]
    if missing:
        raise ConfigError(
            f"this process is one of {rank.world_size} and `{'`, `'.join(missing)}` is not set",
            why="the processes find each other at that address",
            hint="start them with a launcher that sets it, such as torchrun",
        )
    port = env["MASTER_PORT"].strip()
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"`MASTER_PORT={port}` is not a port",
            hint="use a free one between 1024 and 65535, the same for all processes",
        )
    return env["MASTER_ADDR"].strip(), int(port)


@contextlib.contextmanager
def connection(world_size: int) -> Iterator[None]:
    """Turn torch's error of a lost store into an `OtherRankError`: its process has gone."""
    try:
        yield
    except RuntimeError as cause:  # torch's DistNetworkError and its kin
        raise OtherRankError(
            "the connection to rank 0 is lost",
            why=_first_line(cause),
            hint=f"rank 0 of {world_size} may have died: look at its last lines",
        ) from cause


def _stopped(report: Mapping[str, Any]) -> OtherRankError:
    text = f"{report['what']}\n{report['why']}" if report["why"] else report["what"]
    return OtherRankError(
        f"rank {report['rank']} stopped the run",
        why=f"it says: {text}",
        hint="its own output has the rest",
    )


def _lost_peer(error: RuntimeError) -> OtherRankError | None:
    """Return the error of a collective whose other side has gone without a report."""
    if not any(message in str(error) for message in _LOST_PEER_MESSAGES):
        return None
    return OtherRankError(
        "another process of this run has gone in the middle of an exchange",
        why=_first_line(error),
        hint="it may have died: look for the rank that ended first, and at its last lines",
    )


def error_fields(error: BaseException) -> dict[str, str | None]:
    """Return what, why and hint of an error, as JSON."""
    if isinstance(error, LmcoreError):
        return {"what": error.what, "why": error.why, "hint": error.hint}
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return {"what": message, "why": None, "hint": None}


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip() or type(error).__name__
