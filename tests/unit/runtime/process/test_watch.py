"""Signs of life and stacks of the ranks of a run that hangs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from lmcore.runtime.process.watch import (
    RankState,
    Watch,
    collect_states,
    show_states,
)
from lmcore.runtime.store import StoreClient, StoreServer


def wait_here(event: threading.Event) -> None:
    """Be in a function with a name of its own."""
    event.wait(60)


def test_each_rank_shows_where_it_is(ranks, monkeypatch):
    """The rank that asks gets the stacks of all, and what they do."""
    monkeypatch.setattr("lmcore.runtime.process.watch._STACK_SECONDS", 60.0)
    over = threading.Event()
    both = threading.Barrier(2)

    def body(rendezvous):
        rendezvous.watch.activity = lambda: f"step {rendezvous.rank.rank + 7}"
        both.wait(60)
        if rendezvous.rank.rank == 1:
            wait_here(over)
            return None
        time.sleep(1.2)  # a sign of life after the activity is known
        try:
            return collect_states(rendezvous.store, 2)
        finally:
            over.set()

    states, _ = ranks(body, timeout=60.0)
    assert [state.activity for state in states] == ["step 7", "step 8"]
    main = states[1].stacks.split("thread `")[0]
    assert main.startswith("main thread\n")
    assert "wait_here (" in main
    assert "test_watch.py, line " in main


def test_a_rank_without_an_answer(ranks):
    """It is waited for a few seconds, and shown without stacks."""

    def body(rendezvous):
        if rendezvous.rank.rank == 1:
            return None
        assert rendezvous.store.wait(["watch/1/over"], 30.0)
        return collect_states(rendezvous.store, 2)

    states, _ = ranks(body, timeout=60.0)
    assert states[0].stacks
    assert states[1].stacks is None


def test_equal_stacks_are_shown_once():
    """A thousand ranks at the same place are one paragraph."""
    states = [RankState("step 3", {}, "main thread\n  step (a.py, line 1)")] * 1000
    states[17] = RankState("step 2", {}, None)
    text = show_states(states)
    assert text.count("a.py") == 1
    assert "ranks 0-16, 18-999:" in text
    assert "rank 17:\n  no answer" in text


def test_it_ends_though_the_store_is_frozen(monkeypatch):
    """The process with the store may be the stopped one: the timeout of a minute is not spent."""
    monkeypatch.setattr("lmcore.runtime.process.watch._END_SECONDS", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, b"secret")
    thread = threading.Thread(target=server.serve, args=(120.0,))
    thread.start()
    with contextlib.closing(server):
        client = StoreClient(*listener.getsockname(), b"secret", timeout=60.0)
        with Watch(0, 2, client).running():
            server.stop()
            thread.join()
            begin = time.monotonic()
        assert time.monotonic() - begin < 20
    client.close()
