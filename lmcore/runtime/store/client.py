"""Client of the store: requests with a time limit each, from any thread."""

from __future__ import annotations

import contextlib
import copy
import hmac
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from lmcore.runtime.store.wire import (
    HELLO_BYTES,
    LENGTH_BYTES,
    MAGIC,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Authenticator,
    WireError,
    pack,
    proof,
    unpack,
)

__all__ = ["OTHER_SECRET", "StoreClient", "StoreError"]

OTHER_SECRET = "it has another secret"
"""Reason why a server refuses a client with another secret."""

_RETRY_SECONDS = 0.05
_READ_BYTES = 1 << 18


class StoreError(RuntimeError):
    """The server of the store did not answer, has ended, or has another secret.

    It is a `RuntimeError`, as are the errors of torch's stores.
    """


class StoreClient:
    """Connection of a process to the store of its run.

    Values are bytes; text is encoded.  Each request uses a separate connection while it lasts,
    so that threads do not wait for each other.

    Args:
        host: Host of the server.
        port: Port of the server.
        secret: Secret of the run.
        timeout: Time limit of a request, and of connecting, in seconds.
        prefix: Prefix of all keys in the store.
        shared: Keys without the prefix.

    Raises:
        StoreError: The server cannot be reached within the time limit, or the two sides have
            different secrets.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        timeout: float,
        prefix: str = "",
        shared: Collection[str] = (),
    ) -> None:
        self._address, self._secret, self.timeout = (host, port), secret, timeout
        self._prefix, self._shared = prefix, frozenset(shared)
        self._pool = _Pool()
        self._reached = False
        with self._connection(timeout):
            self._reached = True

    def set(self, key: str, value: str | bytes) -> None:
        """Store *value* under *key*."""
        self._request([b"set", self._key(key), _bytes(value)])

    def get(self, key: str) -> bytes | None:
        """Return the value of *key*; None if there is none."""
        found = unpack(self._request([b"get", self._key(key)]))
        return found[0] if found else None

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of *keys* in one request; None for each key that has none."""
        found = unpack(self._request([b"get_all", *(self._key(key) for key in keys)]))
        return [value[1:] if value.startswith(b"1") else None for value in found]

    def add(self, key: str, amount: int) -> int:
        """Add *amount* to the number at *key*, from 0, and return the sum."""
        return int(self._request([b"add", self._key(key), str(amount).encode()]))

    def append(self, key: str, value: str | bytes) -> None:
        """Append *value* to the value of *key*."""
        self._request([b"append", self._key(key), _bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set *key* to *desired* if its value is *expected*; empty: if it has none, too.

        Returns:
            The value afterwards; *expected* if there is none.
        """
        return self._request([b"compare_set", self._key(key), _bytes(expected), _bytes(desired)])

    def delete(self, *keys: str) -> bool:
        """Remove *keys* in one request; return True if all were there."""
        return self._request([b"delete", *(self._key(key) for key in keys)]) == b"1"

    def count(self) -> int:
        """Return the number of keys."""
        return int(self._request([b"count"]))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all *keys* have values."""
        return self.wait(keys, 0.0)

    def wait(self, keys: Sequence[str], seconds: float, *, stop: Sequence[str] = ()) -> bool:
        """Wait until all *keys* have values; return False if they do not.

        Args:
            keys: Names of the values.
            seconds: Longest time to wait.
            stop: Keys that end the wait, as soon as one has a value.
        """
        names = [self._key(key) for key in (*keys, *stop)]
        milliseconds = max(0, int(seconds * 1000))
        request = [b"wait", str(milliseconds).encode(), str(len(keys)).encode(), *names]
        return self._request(request, seconds + self.timeout) == b"1"

    def within(self, seconds: float) -> StoreClient:
        """Return a client of the same store with another time limit of a request."""
        client = copy.copy(self)
        client.timeout = seconds
        return client

    def close(self) -> None:
        """Close the connections: those in use at the end of their requests."""
        self._pool.close()

    def _key(self, key: str) -> bytes:
        return (key if key in self._shared else self._prefix + key).encode()

    def _request(self, fields: Sequence[bytes], seconds: float | None = None) -> bytes:
        with self._connection(self.timeout if seconds is None else seconds) as connection:
            return connection.request(pack(fields))

    @contextlib.contextmanager
    def _connection(self, seconds: float) -> Iterator[_Connection]:
        """Give a connection; it is kept for later unless the block fails."""
        connection = self._pool.take()
        try:
            if connection is None:
                connection = self._connect(time.monotonic() + self.timeout)
            connection.stream.settimeout(seconds)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise StoreError(f"{self._name} did not answer within {seconds:g} s") from error
            if isinstance(error, OSError | WireError):
                raise StoreError(f"{self._name}: {error}") from error
            raise
        self._pool.put(connection)

    def _connect(self, deadline: float) -> _Connection:
        """Return a new connection; refused ones are tried again until *deadline*.

        Raises:
            OSError: There was none until then.
            WireError: The other side has another secret.
        """
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                stream = socket.create_connection(self._address, timeout=left)
                try:
                    return _Connection(stream, self._secret)
                except BaseException:
                    stream.close()
                    raise
            except (TimeoutError, socket.gaierror):
                raise
            except OSError as error:
                # Nobody listens yet, or a flood of strangers pushed this connection out.
                gone = self._reached and isinstance(error, ConnectionRefusedError)
                if gone or time.monotonic() + _RETRY_SECONDS >= deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    @property
    def _name(self) -> str:
        return f"the store at {self._address[0]}:{self._address[1]}"


class _Pool:
    """Connections that are open and not in use."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> _Connection | None:
        """Return a connection; None if all are in use."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def put(self, connection: _Connection) -> None:
        """Keep a connection for the next request, or close it after `close`."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for connection in idle:
            connection.close()


class _Connection:
    """One connection to the server, after both sides have proved that they have the secret.

    Args:
        stream: Connected socket with a time limit.
        secret: Secret of the run.

    Raises:
        OSError: The connection broke.
        WireError: The server has another secret, or is not a store of lmcore.
    """

    def __init__(self, stream: socket.socket, secret: bytes) -> None:
        self.stream = stream
        self._received = bytearray()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = self._read(HELLO_BYTES)
        if not hello.startswith(MAGIC):
            raise WireError("something else than a store of lmcore listens there")
        server_nonce, client_nonce = hello[len(MAGIC) :], os.urandom(NONCE_BYTES)
        stream.sendall(client_nonce + proof(secret, b"client", server_nonce, client_nonce))
        given = self._read(PROOF_BYTES)
        if not hmac.compare_digest(given, proof(secret, b"server", server_nonce, client_nonce)):
            raise WireError(OTHER_SECRET)
        nonces = server_nonce + client_nonce
        self._outgoing = Authenticator(secret, b"client", nonces)
        self._incoming = Authenticator(secret, b"server", nonces)

    def request(self, content: bytes) -> bytes:
        """Send a request and return its answer.

        Raises:
            OSError: The connection broke, or its time limit passed.
            WireError: The answer is not the server's.
        """
        self.stream.sendall(self._outgoing.seal(content))
        length = int.from_bytes(self._read(LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"an answer of {length:,} bytes")
        answer = self._read(length + PROOF_BYTES)
        return self._incoming.open(answer[:length], answer[length:])

    def close(self) -> None:
        """Close it."""
        self.stream.close()

    def _read(self, count: int) -> bytes:
        received = self._received
        while len(received) < count:
            part = self.stream.recv(_READ_BYTES)
            if not part:
                raise ConnectionResetError("the connection was closed")
            received += part
        data = bytes(received[:count])
        del received[:count]
        return data


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
