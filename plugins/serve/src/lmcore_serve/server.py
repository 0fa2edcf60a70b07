"""The HTTP server: listen, answer, and stop without losing a reply."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TextIO

import uvicorn

from lmcore.base.errors import ConfigError, RunError, counted
from lmcore_serve.app import create_app
from lmcore_serve.http.connection import Acceptor, connections_of
from lmcore_serve.http.log_limit import limited_logs

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lmcore_serve.service import Service
    from lmcore_serve.state import Limits, ServerState

__all__ = [
    "KEEP_ALIVE_SECONDS",
    "MAX_HEAD_BYTES",
    "ServerSettings",
    "allowed_connections",
    "configuration",
    "is_loopback",
    "listen",
    "serve",
]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_SWITCH_SECONDS = 0.0005
"""Longest time that a thread keeps Python's lock from others; a tenth of Python's default.

With 16 streams it raises the tokens/s of two cores by 10 to 20%.
"""
_CLOSE_SECONDS = 5.0
"""Time in which the step of a service may end when all connections have."""
_REPLY_SECONDS = 5.0
"""Time for the replies of texts that were ended; afterwards their connections are cut."""
_LEFTOVER_SECONDS = 5.0
"""Time in which what belongs to connections that were cut may end."""
MAX_HEAD_BYTES = 64 * 1024
"""Size of the head of a request."""
KEEP_ALIVE_SECONDS = 5
"""Time after which a connection without a byte of a next request ends."""
_QUEUE = 4096
"""Connections that wait to be accepted.  To one more the system does not answer, and its client
tries again after a second."""
_MOST_WAITING = 256
"""Connections that were accepted and wait for their begin."""
_OTHER_FILES = 256 + _MOST_WAITING
"""File descriptors that are no connections: the model's files, libraries, and the next
connections, which are accepted before another one ends for them."""
LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        keys: API keys; without any, everybody may use it.
        allowed_hosts: Further names that requests may call it by.
        shutdown_seconds: Time that running requests have after a signal.
        log: Stream of the access log; None: no log.
    """

    keys: Sequence[str] = ()
    allowed_hosts: Collection[str] = ()
    shutdown_seconds: float = 30.0
    log: TextIO | None = None


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine reach a name."""
    return host in LOOPBACK_NAMES or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Name or address of this machine.
        port: Port; 0: any free one.

    Raises:
        ConfigError: The address is not this machine's, or the port is taken.
    """
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_QUEUE)
    except OSError as error:
        if made is not None:
            made.close()
        of_port = error.errno in {errno.EADDRINUSE, errno.EACCES}
        raise ConfigError(
            f"cannot listen on `{host}` port {port}",
            why=error.strerror or str(error),
            hint="choose another `--port`, or `--port 0` for any free one"
            if of_port
            else "give an address of this machine, or `--host 0.0.0.0` for all of them",
        ) from None
    made.settimeout(0)
    return made


def serve(state: ServerState, sock: socket.socket, host: str, settings: ServerSettings) -> None:
    """Answer requests until a signal ends the server; return when all replies are sent.

    Args:
        state: Models and limits.
        sock: Socket that listens.
        host: Name that it was given.
        settings: Settings of the server.
    """
    hosts = None
    if is_loopback(host) or settings.allowed_hosts:
        names = {*LOOPBACK_NAMES, host, *settings.allowed_hosts}
        hosts = {name.lower() for name in names}
    log = settings.log

    def write(line: str) -> None:
        assert log is not None
        log.write(line + "\n")
        log.flush()

    app = create_app(state, keys=settings.keys, hosts=hosts, log=write if log is not None else None)
    config = configuration(app, state.limits)
    # `_Server` ends everything before: uvicorn would answer by a bare 500.
    config.timeout_graceful_shutdown = math.ceil(
        settings.shutdown_seconds + _REPLY_SECONDS + _LEFTOVER_SECONDS
    )
    # The loop waits for Python's lock while a model is run, and the model for the loop.
    sys.setswitchinterval(_SWITCH_SECONDS)
    services = [model.service for model in state.models.values()]
    with limited_logs():
        _Server(config, services, settings.shutdown_seconds).run(sockets=[sock])
    if any(service.has_failed for service in services):
        raise RunError("the server ended because it can no longer generate", why="see the log")
    for model in state.models.values():
        if not model.service.close(min(settings.shutdown_seconds, _CLOSE_SECONDS)):
            logger.warning("model `%s`: texts were cut off at the end", model.name)


def configuration(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """Return the configuration of uvicorn with the limits of connections."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        http=connections_of(limits),
        ws="none",
        loop="asyncio",
    )


def allowed_connections(wanted: int) -> int:
    """Return the number of connections that the process has file descriptors for.

    The limit of the process is raised as far as the system allows.

    Args:
        wanted: Number that is wanted; a smaller one is logged.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(soft - _OTHER_FILES, soft // 4, 1)
    logger.warning(
        "at most %d connections at a time instead of %d: `ulimit -n` is %d", allowed, wanted, soft
    )
    return allowed


class _Server(uvicorn.Server):
    """Server that ends after a signal when it has answered, at most a time later.

    Texts that are not complete by then, or at a second signal, end with an error that their
    clients get; a third signal cuts the connections.  The server also ends when a model can no
    longer generate.
    """

    def __init__(
        self, config: uvicorn.Config, services: Sequence[Service], shutdown_seconds: float
    ) -> None:
        super().__init__(config)
        self._services, self._seconds = services, shutdown_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._texts_ended = False
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        create = partial(
            self.config.http_protocol_class,  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        await super().startup([])  # the connections of these sockets are begun here
        self._acceptors = [Acceptor(one, create, _MOST_WAITING) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no connection any more, and end when all replies are sent."""
        for one in self._acceptors:
            one.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the server; called ten times a second."""
        if not self.should_exit and not all(service.is_alive for service in self._services):
            self.should_exit = True
            self._after(self._seconds, self._end_texts)  # another model may go on
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that end the server."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            if self._timer is not None:
                self._timer.cancel()

    def _stop(self) -> None:
        """Take a signal: the first, the second or a further one."""
        if self._texts_ended:
            self.force_exit = True
            self._cut()
        elif self.should_exit:
            self._end_texts()
        else:
            logger.info("stopping when running requests are answered; a second signal ends them")
            self.should_exit = True
            self._after(self._seconds, self._end_texts)

    def _end_texts(self) -> None:
        """End what is generated, and give the replies a moment."""
        self._texts_ended = True
        if count := sum(service.end_all() for service in self._services):
            logger.warning(
                "ending %s not complete", counted(count, "text that is", "texts that are")
            )
        self._after(_REPLY_SECONDS, self._cut)

    def _cut(self) -> None:
        """End all connections; their requests end as if the clients had left."""
        # From Python 3.12.1 on uvicorn waits for the end of all, even if it is to exit at once.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something after a time, in place of what was planned."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, do)
