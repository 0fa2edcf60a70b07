"""Joining: a process finds the store of its run, and connects with the other ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from lmcore.base.errors import ConfigError, OtherRankError, RunError
from lmcore.contract.device_errors import first_line
from lmcore.runtime.launch.rank import AGENT_STORE, RankInfo
from lmcore.runtime.launch.worker_protocol import FAILED, is_lost_peer, launch_info
from lmcore.runtime.process.rendezvous import FAILURE_SECONDS, NoAnswerError, Rendezvous
from lmcore.runtime.process.watch import Watch
from lmcore.runtime.store import (
    OTHER_SECRET,
    SECRET,
    StoreClient,
    StoreError,
    run_secret,
    serve_in_thread,
)

__all__ = ["join_processes"]

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_AGENT_PORT = "lmcore/port"
"""Key of torchrun's own store with the port of the run's store."""
_connections: Counter[tuple[int, str | None, str | None, str]] = Counter()
"""Number of connections so far, by rank, host, port and secret: equal on all ranks of a run."""
_JOINED = "joined"
"""Key in the store of a connection, set when the store belongs to it."""
_RETRY_SECONDS = 0.05
_TIMED_OUT = re.compile(
    r"gloo.*[Tt]imed out|[Tt]imed out waiting \d+ ?ms|caused pair closure"
    r"|collective operation timeout|[Cc]ollective.*timed out",
    re.DOTALL,
)
"""Text of the backends' errors: other errors that mention a time limit are no collective's."""


@contextlib.contextmanager
def join_processes(
    rank: RankInfo, *, timeout: float, env: Mapping[str, str] = os.environ
) -> Iterator[Rendezvous]:
    """Connect this process with the other ranks of its run, until the block ends.

    An exception that leaves the block stops the other ranks at their next exchange, with its text.

    Args:
        rank: Rank of this process.
        timeout: Time limit for the other processes, here and in every exchange, in seconds.
        env: Environment with MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: The address is missing or wrong.
        RunError: Other processes cannot be reached, or did not all connect.
    """
    secret = launch_info(env).secret
    owner = "the launcher" if secret else "rank 0"
    place = (rank.rank, env.get("MASTER_ADDR"), env.get("MASTER_PORT"), secret)
    number = _connections[place]
    _connections[place] += 1
    with _store(rank, timeout, env, owner, number) as (store, keeps_store):
        watch = Watch(rank.rank, rank.world_size, store)
        rendezvous = Rendezvous(rank, timeout, store, keeps_store, watch, owner)
        failed = True
        try:
            with watch.running():
                try:
                    rendezvous.barrier("all processes of the run to start")
                    yield rendezvous
                except RuntimeError as error:
                    failure = _other_ranks_failure(error, rendezvous)
                    if failure:
                        raise failure from error
                    raise
                except NoAnswerError as error:
                    rendezvous.show_states(error)
                    raise
            failed = False
        except BaseException as error:
            rendezvous.report_failure(error)
            raise
        finally:
            rendezvous.leave(failed=failed)


def _other_ranks_failure(error: RuntimeError, rendezvous: Rendezvous) -> RunError | None:
    """Return the failure of another rank that explains torch's *error*; None if there is none."""
    failure = rendezvous.reported_failure(wait=FAILURE_SECONDS) or _lost_peer(error)
    if failure is None and _TIMED_OUT.search(str(error)):
        failure = rendezvous.no_answer(error)
    return failure


@contextlib.contextmanager
def _store(
    rank: RankInfo, timeout: float, env: Mapping[str, str], owner: str, number: int
) -> Iterator[tuple[StoreClient, bool]]:
    """Yield the store of the run, and True if this process has it.

    lmcore's launcher has the store of the processes that it starts, and keeps it for later
    connections of theirs, each with separate keys.  In other runs rank 0 has it.
    """
    launched = launch_info(env)
    handed = launched.secret
    host, port = (_LOOPBACK, launched.store_port) if launched.store_port else _address(rank, env)
    secret = bytes.fromhex(handed) if handed else run_secret(env)
    keeps_store = rank.rank == 0 and not handed
    if rank.world_size == rank.local_world_size:
        host = _LOOPBACK
    with contextlib.ExitStack() as stack:
        agent = None if handed else _torchrun_store(rank, timeout, env)
        try:
            if keeps_store:
                listener = _listen(host, 0 if agent else port)
                stack.enter_context(serve_in_thread(listener, secret))
                if agent:
                    agent.set(_agent_key(env, number), str(listener.getsockname()[1]))
            if agent:
                port = int(agent.get(_agent_key(env, number)))
            store = _connect(
                *(host, port, secret, timeout, number),
                keeps_store=keeps_store,
                may_be_old=number > 0 and not handed,
            )
        except (OSError, RuntimeError) as cause:
            does = "listen" if keeps_store else f"reach {owner}"
            hint = (
                "MASTER_ADDR must be the host of rank 0, which all others reach, and "
                "MASTER_PORT a free port there"
            )
            if OTHER_SECRET in str(cause):
                hint = (
                    f"set `{SECRET}` to the same value on all hosts; MASTER_ADDR and MASTER_PORT "
                    "must be the same text, too, and another run must not listen there"
                )
            raise RunError(
                f"rank {rank.rank} of {rank.world_size} cannot {does} at {host}:{port}",
                why=first_line(cause),
                hint=hint,
            ) from cause
        yield store, keeps_store


def _connect(
    host: str,
    port: int,
    secret: bytes,
    timeout: float,
    number: int,
    *,
    keeps_store: bool,
    may_be_old: bool,
) -> StoreClient:
    """Return a client of the store with the keys of a connection.

    Args:
        host: Host of the store.
        port: Port of the store.
        secret: Secret of the run.
        timeout: Time limit in seconds.
        number: Number of the connection.
        keeps_store: True if this process has the store.
        may_be_old: True if the store of the connection before may still be at the address.
    """
    deadline = time.monotonic() + timeout
    prefix = f"{number}:" if number else ""
    while True:
        store = StoreClient(host, port, secret, timeout=timeout, prefix=prefix, shared=[FAILED])
        if keeps_store:
            store.set(_JOINED, "")
        if not may_be_old:
            return store
        with contextlib.suppress(StoreError):  # the process with the store has closed it
            if store.wait([_JOINED], _RETRY_SECONDS):
                return store
        store.close()
        if time.monotonic() > deadline:
            raise StoreError(f"the store at {host}:{port} is that of an earlier connection")
        time.sleep(_RETRY_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at the address, or at all addresses if the host lacks it."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family, backlog=_BACKLOG)


def _torchrun_store(rank: RankInfo, timeout: float, env: Mapping[str, str]) -> Any:
    """Return the store of torchrun, which occupies the port of the run; None if there is none.

    Raises:
        RunError: torchrun's store cannot be reached.
    """
    if env.get(AGENT_STORE) != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

    host, port = _address(rank, env)
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as cause:
        raise RunError(
            f"rank {rank.rank} of {rank.world_size} cannot reach torchrun's store at {host}:{port}",
            why=first_line(cause),
            hint=f"if torchrun did not start this process, unset {AGENT_STORE}",
        ) from cause


def _agent_key(env: Mapping[str, str], number: int) -> str:
    return f"{_AGENT_PORT}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"


def _address(rank: RankInfo, env: Mapping[str, str]) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name, "").strip()]
    if missing:
        raise ConfigError(
            f"this process is one of {rank.world_size} and `{'`, `'.join(missing)}` is not set",
            why="the processes find each other at that address",
            hint="set MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, for all "
            "processes, or start them with a launcher that does, such as torchrun",
        )
    port = env["MASTER_PORT"].strip()
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"`MASTER_PORT={port}` is not a port",
            hint="use a free one between 1024 and 65535, the same for all processes",
        )
    return env["MASTER_ADDR"].strip(), int(port)


def _lost_peer(error: RuntimeError) -> OtherRankError | None:
    """Return the error of a collective whose other side ended without a report."""
    if not is_lost_peer(error):
        return None
    return OtherRankError(
        "another process of this run ended during a collective",
        why=first_line(error),
        hint="it may have died: look for the rank that ended first, and at its last lines",
    )
