"""`Connection`: uvicorn's protocol of a connection, with the limits that uvicorn has not.

A client has a time to send the head of a request, from the begin of its connection or the end of
the reply before, and a time to read a reply.  When all connections are in use, a new one takes the
place of the one that has waited longest without a whole request, so that idle and slow clients
keep nobody out.  A client that ends its own side after a request gets the reply.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

if TYPE_CHECKING:
    from lmcore.serving.state import Limits

__all__ = ["Connection", "connections_of"]

_PROBE_SECONDS = 0.5
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 24\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\nall connections are used"
)


def connections_of(limits: Limits) -> Any:
    """Return uvicorn's option `http`: what makes the object of a new connection."""
    return partial(Connection, limits=limits, by_age={})


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
