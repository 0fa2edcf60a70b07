"""Server of the store: one thread, any number of connections, bounded memory for strangers."""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lmcore.runtime.store.wire import (
    LENGTH_BYTES,
    MAGIC,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSAL,
    Authenticator,
    WireError,
    pack,
    proof,
    unpack,
)

__all__ = ["StoreServer", "serve_in_thread"]

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_MAX_STRANGERS = 128
"""Connections without proof of the secret; the oldest gives way to a new one."""
_PROOF_SECONDS = 10.0
"""Time for the proof after a connection was accepted."""
_LONGEST_POLL = 1.0
_YES, _NO = b"1", b"0"


@dataclass(eq=False)
class _Connection:
    """One accepted connection; `incoming` is None until its secret is proved.

    Attributes:
        is_full: True if the system took only a part of an answer, and reports when it takes more.
    """

    stream: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    incoming: Authenticator | None = None
    outgoing: Authenticator | None = None
    is_full: bool = False


@dataclass(eq=False)
class _Waiting:
    """A request that is answered when all of its keys, or one of `stop`, exist, or at a time.

    Attributes:
        missing: Keys without a value, which another request may delete again.
    """

    connection: _Connection
    keys: list[bytes]
    stop: list[bytes]
    deadline: float
    missing: set[bytes] = field(default_factory=set)


class StoreServer:
    """Key-value store for processes that have its secret.

    Args:
        listener: Listening socket, which the server closes at the end.
        secret: Secret of the run.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._values: dict[bytes, bytes] = {}
        self._connections: dict[_Connection, None] = {}
        self._waiting: dict[_Waiting, None] = {}
        self._waiting_for: dict[bytes, dict[_Waiting, None]] = {}
        self._next_deadline = math.inf
        self._selector = selectors.DefaultSelector()
        listener.settimeout(0.0)
        self._stopped, self._stop = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._requests: dict[bytes, Callable[..., bytes]] = {
            b"set": self._set,
            b"get": self._get,
            b"get_all": self._get_all,
            b"add": self._add,
            b"append": self._append,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"count": self._count,
        }

    def serve(self, seconds: float) -> bool:
        """Answer requests for *seconds*, or until `stop` is called; return False after `stop`."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= self._next_deadline:
                self._answer_late(now)
            pause = max(0.0, min(end, now + _LONGEST_POLL, self._next_deadline) - now)
            for key, mask in self._selector.select(pause):
                if key.fileobj is self._stopped:
                    return False
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if mask & selectors.EVENT_WRITE and key.data in self._connections:
                    self._send(key.data)
                if mask & selectors.EVENT_READ and key.data in self._connections:
                    self._receive(key.data)
            if time.monotonic() >= end:
                return True

    def stop(self) -> None:
        """Make `serve` return at once; may be called from another thread."""
        self._stop.close()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for stream in (self._listener, self._stop, self._stopped):
            stream.close()

    def put(self, key: str, value: str) -> None:
        """Set *key* in the server's own process, unless it has a value."""
        self._compare_set(key.encode(), b"", value.encode())

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:  # no file descriptor is left, or the client closed the connection
            self._drop_oldest_stranger()
            return
        stream.settimeout(0.0)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(stream, os.urandom(NONCE_BYTES), time.monotonic() + _PROOF_SECONDS)
        strangers = sum(known.incoming is None for known in self._connections)
        if strangers >= _MAX_STRANGERS:
            self._drop_oldest_stranger()
        self._connections[connection] = None
        self._next_deadline = min(self._next_deadline, connection.deadline)
        self._selector.register(stream, selectors.EVENT_READ, connection)
        self._queue(connection, MAGIC + connection.nonce)

    def _drop_oldest_stranger(self) -> None:
        for connection in self._connections:
            if connection.incoming is None:
                self._drop(connection)
                return

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._selector.unregister(connection.stream)
        connection.stream.close()
        for waiting in [item for item in self._waiting if item.connection is connection]:
            self._forget(waiting)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.stream.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.received += data
        try:
            if connection.incoming is None:
                self._check_proof(connection)
            while connection.incoming is not None and self._take_message(connection):
                pass
        except WireError as error:
            logger.debug("store: a connection is closed: %s", error)
            self._drop(connection)

    def _check_proof(self, connection: _Connection) -> None:
        size = NONCE_BYTES + PROOF_BYTES
        if len(connection.received) < size:
            return
        nonce = bytes(connection.received[:NONCE_BYTES])
        given = bytes(connection.received[NONCE_BYTES:size])
        nonces = connection.nonce + nonce
        if not hmac.compare_digest(given, proof(self._secret, b"client", connection.nonce, nonce)):
            self._queue(connection, REFUSAL)
            raise WireError("it has another secret")
        del connection.received[:size]
        connection.incoming = Authenticator(self._secret, b"client", nonces)
        connection.outgoing = Authenticator(self._secret, b"server", nonces)
        self._queue(connection, proof(self._secret, b"server", connection.nonce, nonce))

    def _take_message(self, connection: _Connection) -> bool:
        """Answer the next request that has arrived whole; return True if there was one."""
        received = connection.received
        if len(received) < LENGTH_BYTES:
            return False
        length = int.from_bytes(received[:LENGTH_BYTES], "big")
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length:,} bytes")
        end = LENGTH_BYTES + length
        if len(received) < end + PROOF_BYTES:
            return False
        assert connection.incoming is not None
        content = bytes(received[LENGTH_BYTES:end])
        content = connection.incoming.open(content, bytes(received[end : end + PROOF_BYTES]))
        del received[: end + PROOF_BYTES]
        name, *arguments = unpack(content) or [b""]
        if name == b"wait":
            self._wait(connection, *arguments)
            return connection in self._connections
        request = self._requests.get(name)
        if request is None:
            raise WireError("an unknown request")
        try:
            answer = request(*arguments)
        except (TypeError, ValueError) as error:
            raise WireError(f"a malformed request: {error}") from None
        self._answer(connection, answer)
        return connection in self._connections

    def _answer(self, connection: _Connection, answer: bytes) -> None:
        assert connection.outgoing is not None
        self._queue(connection, connection.outgoing.seal(answer))

    def _queue(self, connection: _Connection, data: bytes) -> None:
        connection.unsent += data
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.stream.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        del connection.unsent[:sent]
        if connection.unsent or connection.is_full:
            connection.is_full = bool(connection.unsent)
            write = selectors.EVENT_WRITE if connection.unsent else 0
            self._selector.modify(connection.stream, selectors.EVENT_READ | write, connection)

    def _answer_late(self, now: float) -> None:
        """Answer requests that waited long enough, and drop strangers that gave no proof."""
        for waiting in [waiting for waiting in self._waiting if waiting.deadline <= now]:
            if waiting in self._waiting:
                self._forget(waiting)
                self._answer(waiting.connection, _NO)
        for connection in list(self._connections):
            if connection.incoming is None and connection.deadline <= now:
                self._drop(connection)
        unproven = (each.deadline for each in self._connections if each.incoming is None)
        self._next_deadline = min(
            min(unproven, default=math.inf),
            min((waiting.deadline for waiting in self._waiting), default=math.inf),
        )

    def _wait(self, connection: _Connection, *arguments: bytes) -> None:
        try:
            milliseconds, num_keys, *keys = arguments
            deadline = time.monotonic() + int(milliseconds) / 1000
            split = int(num_keys)
        except ValueError:
            raise WireError("a malformed request to wait") from None
        waiting = _Waiting(connection, keys[:split], keys[split:], deadline)
        waiting.missing = {key for key in waiting.keys if key not in self._values}
        if not waiting.missing or any(key in self._values for key in waiting.stop):
            self._answer(connection, _NO if waiting.missing else _YES)
            return
        self._waiting[waiting] = None
        for key in (*waiting.keys, *waiting.stop):
            self._waiting_for.setdefault(key, {})[waiting] = None
        self._next_deadline = min(self._next_deadline, deadline)

    def _forget(self, waiting: _Waiting) -> None:
        """Remove a request to wait that was answered, or whose connection was closed."""
        del self._waiting[waiting]
        for key in {*waiting.keys, *waiting.stop}:
            others = self._waiting_for[key]
            del others[waiting]
            if not others:
                del self._waiting_for[key]

    def _added(self, key: bytes) -> None:
        """Answer the requests that waited for *key* and have nothing left to wait for."""
        for waiting in list(self._waiting_for.get(key, ())):
            if waiting not in self._waiting:  # dropped while another was answered
                continue
            waiting.missing.discard(key)
            if not waiting.missing or key in waiting.stop:
                self._forget(waiting)
                self._answer(waiting.connection, _NO if waiting.missing else _YES)

    def _set(self, key: bytes, value: bytes) -> bytes:
        new = key not in self._values
        self._values[key] = value
        if new:
            self._added(key)
        return _YES

    def _get(self, key: bytes) -> bytes:
        value = self._values.get(key)
        return pack([] if value is None else [value])

    def _get_all(self, *keys: bytes) -> bytes:
        values = (self._values.get(key) for key in keys)
        return pack([_NO if value is None else _YES + value for value in values])

    def _add(self, key: bytes, amount: bytes) -> bytes:
        number = int(self._values.get(key, b"0")) + int(amount)
        self._set(key, str(number).encode())
        return str(number).encode()

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set *key* if it has the expected value, or is missing and none is expected."""
        value = self._values.get(key)
        if value is None and expected:
            return expected
        if value is None or value == expected:
            self._set(key, desired)
            return desired
        return value

    def _append(self, key: bytes, value: bytes) -> bytes:
        return self._set(key, self._values.get(key, b"") + value)

    def _delete(self, *keys: bytes) -> bytes:
        found = [key for key in keys if self._values.pop(key, None) is not None]
        for key in found:
            for waiting in self._waiting_for.get(key, ()):
                waiting.missing |= {key} & {*waiting.keys}
        return _YES if len(found) == len(keys) else _NO

    def _count(self) -> bytes:
        return str(len(self._values)).encode()


@contextlib.contextmanager
def serve_in_thread(listener: socket.socket, secret: bytes) -> Iterator[StoreServer]:
    """Serve the store in a daemon thread while the block runs.

    Raises:
        RuntimeError: The system gives no more threads.
    """
    server = StoreServer(listener, secret)

    def run() -> None:
        while server.serve(_LONGEST_POLL):
            pass

    thread = threading.Thread(target=run, name="lmcore-store", daemon=True)
    try:
        thread.start()
        yield server
    finally:
        server.stop()
        if thread.ident is not None:
            thread.join()
        server.close()
