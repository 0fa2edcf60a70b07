"""Connections: which begin first, and uvicorn's protocol with the limits that uvicorn has not.

A client has a time to send the head of a request, from the begin of its connection or the end of
the reply before, and a time to read a reply.  When all connections are in use, a new one takes the
place of the one that has waited longest without a whole request, so that idle and slow clients
keep nobody out.  A client that ends its own side after a request gets the reply.  To begin a
connection costs more than to accept it, so a flood of slow ones waits for its begin while a client
with a whole request does not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

if TYPE_CHECKING:
    from lmcore_serve.state import Limits

__all__ = ["Acceptor", "Connection", "connections_of"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_ACCEPTED_AT_ONCE = 128
"""Connections that are accepted before others are served."""
_BEGUN_AT_ONCE = 8
"""Connections without a whole head that begin before others are served."""
_LONGEST_LOOK = 8192
"""Bytes in which the end of a head is looked for; a longer head waits with the slow ones."""
_ACCEPT_AGAIN_SECONDS = 1.0
"""Time until the next connection is accepted after the process had no file for one."""
_PROBE_SECONDS = 0.5
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 24\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\nall connections are used"
)


def connections_of(limits: Limits) -> Any:
    """Return uvicorn's option `http`: what makes the object of a new connection."""
    return partial(Connection, limits=limits, by_age={})


class Acceptor:
    """Listener that begins connections with a whole head at once, and the others by and by."""

    def __init__(
        self, listening: socket.socket, create: Callable[[], asyncio.Protocol], most: int
    ) -> None:
        """Begin to accept; called in the running loop.

        Args:
            listening: Socket that listens, without blocking.
            create: Function that creates the protocol of a new connection.
            most: Largest number of connections that wait for their begin; others are not accepted.
        """
        self._listening, self._create, self._most = listening, create, most
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[socket.socket] = deque()
        self._beginning: set[asyncio.Task[object]] = set()
        self._next: asyncio.Handle | None = None
        self._again: asyncio.Handle | None = None
        self._newest = False
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """End the connections that have not begun, and accept no other."""
        self._loop.remove_reader(self._listening)
        for handle in (self._next, self._again):
            if handle is not None:
                handle.cancel()
        for one in self._waiting:
            one.close()
        self._waiting.clear()

    def _accept(self) -> None:
        """Accept what has come."""
        for _ in range(min(_ACCEPTED_AT_ONCE, self._most - len(self._waiting))):
            try:
                accepted, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no file descriptor: the system would call again at once
                logger.warning("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._again = self._loop.call_later(
                    _ACCEPT_AGAIN_SECONDS, self._loop.add_reader, self._listening, self._accept
                )
                break
            accepted.setblocking(False)  # noqa: FBT003 -- the argument has no name
            if _sent_a_head(accepted):
                self._begin(accepted)
            else:
                self._waiting.append(accepted)
        if self._waiting and self._next is None:
            self._next = self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        """Begin some of the connections that wait, the newest and the oldest in turns.

        A client that was accepted a moment before its request came is among the newest.
        """
        for _ in range(min(_BEGUN_AT_ONCE, len(self._waiting))):
            self._newest = not self._newest
            self._begin(self._waiting.pop() if self._newest else self._waiting.popleft())
        self._next = self._loop.call_soon(self._begin_some) if self._waiting else None

    def _begin(self, accepted: socket.socket) -> None:
        task: asyncio.Task[object] = self._loop.create_task(self._connect(accepted))
        self._beginning.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            await self._loop.connect_accepted_socket(self._create, accepted)


def _sent_a_head(accepted: socket.socket) -> bool:
    """Return whether the client of a new connection has sent a whole head, or has left."""
    try:
        sent = accepted.recv(_LONGEST_LOOK, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not sent or b"\r\n\r\n" in sent


class Connection(H11Protocol):
    """A connection with a client."""

    def __init__(
        self, *args: Any, limits: Limits, by_age: dict[Connection, None], **options: Any
    ) -> None:
        """Take uvicorn's arguments, the limits, and the server's connections by age.

        Args:
            args: Arguments of uvicorn's protocol.
            limits: Limits of the server.
            by_age: Open connections, the one first whose request or begin is longest ago.
            options: Options of uvicorn's protocol.
        """
        super().__init__(*args, **options)
        self._limits, self._by_age = limits, by_age
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, in place of another connection if there are too many."""
        super().connection_made(transport)
        self._by_age[self] = None
        self._watch(self._limits.head_seconds)
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        super().data_received(data)
        if not self.waits_for_head and not self.flow.write_paused:
            self._unwatch()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the client to read the reply."""
        if self in self._by_age:
            del self._by_age[self]
            self._by_age[self] = None  # the youngest
        super().on_response_complete()
        if not self.waits_for_head:
            return  # the next request had come already
        limits = self._limits
        unread = self.transport.get_write_buffer_size()
        self._watch(limits.unread_seconds if unread else limits.head_seconds)
        if self._half_closed and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._watch(self._limits.unread_seconds)

    def resume_writing(self) -> None:
        """Continue a reply that the client reads."""
        super().resume_writing()
        if not self.waits_for_head:
            self._unwatch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection for the reply to a client that ended its own side."""
        if self.waits_for_head or self.cycle.more_body:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._by_age.pop(self, None)
        self._unwatch()

    @property
    def waits_for_head(self) -> bool:
        """True while the client has sent no request that is to be answered."""
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn begins with None
        return cycle is None or cycle.response_complete

    def _make_room(self) -> None:
        """End the connection that has waited longest without a whole request, or this one."""
        # Not those without a head first: a slow body would outlast a client that has just come.
        # In a flood of new connections the first of them is slow: the search ends there.
        ended = next(
            one for one in self._by_age if one is self or one.waits_for_head or one.cycle.more_body
        )
        if ended is self:  # the youngest: no other is slow
            self.transport.write(_FULL)
            self.transport.close()
        else:
            ended.transport.abort()
        self.connections.discard(ended)  # at once: others may be about to begin
        del self._by_age[ended]

    def _watch(self, seconds: float) -> None:
        """End the connection after a time, unless something comes before."""
        self._unwatch()
        self._unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """End the connection, unless its client reads a reply, however slowly."""
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:
            self._watch(self._limits.unread_seconds)
        else:
            self.transport.abort()

    def _probe(self) -> None:
        """Send what only a client that is still there can take.

        A client that has left and one that only ended its own side look the same until a write
        fails.  Every client of HTTP/1.1 takes the interim status 100 at any time before the reply.
        """
        if self.transport.is_closing() or self.waits_for_head or self.cycle.response_started:
            return
        if self.scope["http_version"] != "1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self.loop.call_later(_PROBE_SECONDS, self._probe)
