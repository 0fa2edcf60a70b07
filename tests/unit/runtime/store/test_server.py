"""The store of a run: requests, waiting, and connections of processes without its secret."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lmcore.runtime.store import StoreClient, StoreError, serve_in_thread
from lmcore.runtime.store.wire import (
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Authenticator,
    pack,
    proof,
)

SECRET = b"the secret of these tests, a run's"


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Address of a store that is served."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)  # as a launcher's
    address = listener.getsockname()
    with serve_in_thread(listener, SECRET):
        yield address


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[StoreClient]:
    """Client that knows the secret."""
    client = StoreClient(*address, SECRET, timeout=10.0)
    yield client
    client.close()


def test_requests(client: StoreClient) -> None:
    """Each request has the effect and the answer that torch's stores give."""
    assert client.get("a") is None
    client.set("a", "text")
    client.set("b", b"\x00\xff")
    assert (client.get("a"), client.get("b")) == (b"text", b"\x00\xff")
    client.append("a", " and more")
    assert client.get("a") == b"text and more"
    assert [client.add("n", 3), client.add("n", -1), client.add("n", 0)] == [3, 2, 2]
    assert client.get("n") == b"2"
    assert client.compare_set("new", "", "first") == b"first"
    assert client.compare_set("new", "", "second") == b"first"
    assert client.compare_set("new", "first", "third") == b"third"
    assert client.compare_set("none", "expected", "x") == b"expected"
    assert client.get("none") is None
    assert client.check(["a", "b"])
    assert not client.check(["a", "none"])
    assert client.count() == 4
    client.set("empty", b"")
    assert client.get_all(["b", "none", "empty"]) == [b"\x00\xff", None, b""]
    assert client.get_all([]) == []
    assert client.delete("n", "empty")
    assert not client.delete("b", "none")  # the first is removed
    assert client.get("b") is None
    client.set("b", "")
    client.set("n", "")
    assert client.delete("a")
    assert not client.delete("a")
    assert client.count() == 3


def test_large_and_empty_values(client: StoreClient) -> None:
    """A value of several reads arrives whole, and an empty one is a value."""
    value = os.urandom(5_000_000)
    client.set("large", value)
    assert client.get("large") == value
    client.set("empty", "")
    assert client.get("empty") == b""
    assert client.check(["empty"])


def test_a_wait_ends_with_the_last_key(client: StoreClient) -> None:
    """It ends at once, not at its limit, and other threads use the client meanwhile."""
    begin = time.monotonic()
    for delay, key in ((0.1, "a"), (0.2, "b")):
        threading.Timer(delay, client.set, (key, "")).start()
    assert client.wait(["a", "b"], 30.0)
    assert 0.15 < time.monotonic() - begin < 10


def test_a_wait_ends_with_a_stop_key_or_at_its_limit(client: StoreClient) -> None:
    """Both are no success."""
    begin = time.monotonic()
    threading.Timer(0.1, client.set, ("failed", "")).start()
    assert not client.wait(["never"], 30.0, stop=["other", "failed"])
    assert not client.wait(["never"], 0.2)
    assert time.monotonic() - begin < 10


def test_a_key_that_is_removed_during_a_wait(client: StoreClient) -> None:
    """All keys must have values at the same time; an ended wait leaves nothing behind."""
    client.set("a", "")
    for delay, action in ((0.1, lambda: client.delete("a")), (0.2, lambda: client.set("b", ""))):
        threading.Timer(delay, action).start()
    assert not client.wait(["a", "b"], 0.5)
    threading.Timer(0.1, client.set, ("a", "")).start()
    assert client.wait(["a", "b", "a"], 30.0)
    assert not client.wait(["none"], 0.1, stop=["none too"])
    client.set("none", "")
    client.set("none too", "")
    assert client.check(["none"])


def test_threads_share_a_client(client: StoreClient) -> None:
    """No addition is lost."""
    threads = [
        threading.Thread(target=lambda: [client.add("n", 1) for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.add("n", 0) == 400


def test_another_secret_is_refused(address: tuple[str, int], client: StoreClient) -> None:
    """It is refused at once, and the store continues."""
    begin = time.monotonic()
    with pytest.raises(StoreError, match="another secret"):
        StoreClient(*address, b"another secret of another run", timeout=30.0)
    assert time.monotonic() - begin < 10
    client.set("a", "b")


def test_a_server_without_the_secret_is_refused() -> None:
    """A stranger at the port cannot pass for the store: it cannot make the proof."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        stream, _ = listener.accept()
        with stream:
            stream.sendall(MAGIC + bytes(NONCE_BYTES))
            stream.recv(NONCE_BYTES + PROOF_BYTES)
            stream.sendall(os.urandom(PROOF_BYTES))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(StoreError, match="another secret"):
        StoreClient(*listener.getsockname(), SECRET, timeout=10.0)
    thread.join()
    listener.close()


def test_something_else_at_the_port() -> None:
    """It is named, and not waited for."""
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        stream, _ = listener.accept()
        with stream:
            stream.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100))

    thread = threading.Thread(target=greet)
    thread.start()
    with pytest.raises(StoreError, match="something else than a store"):
        StoreClient(*listener.getsockname(), SECRET, timeout=10.0)
    thread.join()
    listener.close()


GARBAGE = [
    b"\xff" * 1000,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    (2**62).to_bytes(8, "big") * 20,
    bytes(NONCE_BYTES + PROOF_BYTES),
    b"",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_reads_and_changes_nothing(
    garbage: bytes, address: tuple[str, int], client: StoreClient
) -> None:
    """The stranger gets the greeting and a refusal, nothing of the store."""
    client.set("configuration", "a path of the run")
    with socket.create_connection(address, timeout=10.0) as stranger:
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        answer = b""
        while part := stranger.recv(4096):
            answer += part
    assert len(answer) <= HELLO_BYTES + PROOF_BYTES
    assert b"path" not in answer
    assert client.count() == 1


def test_a_repeated_message_is_refused(address: tuple[str, int], client: StoreClient) -> None:
    """A recorded request does not count again on its own connection, nor on another."""
    connection = socket.create_connection(address, timeout=10.0)
    hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
    nonces = hello[len(MAGIC) :] + bytes(NONCE_BYTES)
    given = proof(SECRET, b"client", hello[len(MAGIC) :], bytes(NONCE_BYTES))
    connection.sendall(bytes(NONCE_BYTES) + given)
    connection.recv(PROOF_BYTES, socket.MSG_WAITALL)
    message = Authenticator(SECRET, b"client", nonces).seal(pack([b"add", b"n", b"1"]))
    connection.sendall(message + message)
    while connection.recv(4096):
        pass  # the answer to the first, then the end
    connection.close()
    assert client.add("n", 0) == 1
    with socket.create_connection(address, timeout=10.0) as replayed:
        replayed.sendall(bytes(NONCE_BYTES) + given + message)
        replayed.shutdown(socket.SHUT_WR)
        while replayed.recv(4096):
            pass
    assert client.add("n", 0) == 1


def test_a_flood_of_strangers(address: tuple[str, int], client: StoreClient) -> None:
    """1,500 idle connections keep no process of the run out, and are not kept themselves."""
    client.set("a", "b")
    strangers = []
    try:
        strangers += [socket.create_connection(address, timeout=10.0) for _ in range(1500)]
        assert client.get("a") == b"b"
        late = StoreClient(*address, SECRET, timeout=30.0)
        assert late.get("a") == b"b"
        late.close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_store_that_ends(address: tuple[str, int]) -> None:
    """Its clients get an error, not a hang; the same if it is frozen."""
    listener = socket.create_server(("127.0.0.1", 0))
    with serve_in_thread(listener, SECRET):
        client = StoreClient(*listener.getsockname(), SECRET, timeout=0.3)
        client.set("a", "b")
    with pytest.raises(StoreError):
        client.get("a")
    silent = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(StoreError, match=r"did not answer within 0\.3 s"):
        StoreClient(*silent.getsockname(), SECRET, timeout=0.3)
    silent.close()
