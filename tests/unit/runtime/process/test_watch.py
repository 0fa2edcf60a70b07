"""Signs of life and stacks of the ranks of a run that hangs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.process.rendezvous import Rendezvous
from lmcore.runtime.process.watch import RankState, Watch, collect_states, show_states
from lmcore.runtime.store import StoreClient, StoreServer, serve_in_thread


def wait_here(event: threading.Event) -> None:
    """Wait in a function with a recognisable name."""
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


def test_a_stopped_rank_is_named_and_a_rank_that_has_left_is_not(monkeypatch, capsys):
    """A rank whose part of the run is over answers as little as a stopped one, but is healthy."""
    monkeypatch.setattr("lmcore.runtime.process.watch._STACK_SECONDS", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    with serve_in_thread(listener, b"secret"):
        client = StoreClient(*listener.getsockname(), b"secret", timeout=60.0)
        with Watch(1, 3, client).running():
            pass
        waiting = Watch(0, 3, client)
        with waiting.running():
            rendezvous = Rendezvous(RankInfo(0, 0, 3, 3), 60.0, client, False, waiting)
            error = rendezvous.no_answer(RuntimeError("timed out"))
        client.close()
    assert error.what.startswith("no answer from rank 2: a collective of rank 0 did not end")
    assert "rank 1: left the run before" in str(error.why).splitlines()
    shown = capsys.readouterr().err
    assert "rank 1:\n  left the run before" in shown
    assert "rank 2:\n  no answer" in shown


def test_a_rank_without_a_thread_is_not_taken_for_a_stopped_one(monkeypatch):
    """It cannot show its stack, and the states of the ranks say so."""
    monkeypatch.setattr("lmcore.runtime.process.watch.start_optional", lambda *_, **__: False)
    listener = socket.create_server(("127.0.0.1", 0))
    with serve_in_thread(listener, b"secret"):
        client = StoreClient(*listener.getsockname(), b"secret", timeout=60.0)
        with Watch(0, 1, client).running():
            states = collect_states(client, 1)
        client.close()
    assert not states[0].silent
    assert "unknown: no thread could be started" in show_states(states)


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
