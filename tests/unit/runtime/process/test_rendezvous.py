"""Small notes between ranks: exchanged, and what happens when somebody fails or does not come."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import pytest

from lmcore.base.errors import ConfigError, DataError, OtherRankError, RunError
from lmcore.runtime.launch.rank import RankInfo, named_ranks
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.store import serve_in_thread

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everyone_gets_every_note_in_the_order_of_ranks(ranks, world_size):
    """Two exchanges in a row do not mix."""

    def body(rendezvous):
        me = rendezvous.rank.rank
        first = rendezvous.gather({"rank": me})
        rendezvous.barrier()
        return first, rendezvous.gather([me, None, "ü"])

    for first, second in ranks(body, world_size):
        assert first == [{"rank": rank} for rank in range(world_size)]
        assert second == [[rank, None, "ü"] for rank in range(world_size)]


def test_exchanges_leave_no_keys(ranks):
    """The store has as many keys after many exchanges as after the first one."""

    def body(rendezvous):
        counts = []
        for _ in range(20):
            rendezvous.gather(rendezvous.rank.rank)
            counts.append(rendezvous.store.count() if rendezvous.rank.rank == 0 else 0)
        rendezvous.barrier()
        return max(counts[1:]) - counts[0]

    # Another rank may have sent its value of the next exchange.
    assert ranks(body, 3)[0] <= 2


def test_a_port_is_used_again(ranks, monkeypatch):
    """Runs of one process at one port, with different numbers of ranks, do not mix."""
    create = socket.create_server
    with create(("127.0.0.1", 0)) as reserved:
        place = reserved.getsockname()
    monkeypatch.setattr(socket, "create_server", lambda _: create(place))
    for world_size in (2, 3, 2):
        expected = [[1] * world_size] * world_size
        assert ranks(lambda rendezvous: rendezvous.gather(1), world_size) == expected


def test_a_rank_that_fails_stops_the_others_at_once(ranks):
    """They get its words, and do not wait for the timeout."""

    def body(rendezvous):
        if rendezvous.rank.rank == 1:
            raise DataError("no such corpus", why="the disk is not mounted")
        rendezvous.barrier("the corpus")

    begin = time.monotonic()
    first, second, third = ranks(body, 3, timeout=60.0)
    assert time.monotonic() - begin < 15
    assert isinstance(second, DataError)
    for heard in (first, third):
        assert isinstance(heard, RunError)
        assert heard.what == "rank 1 stopped the run"
        assert heard.why == "it says: no such corpus\nthe disk is not mounted"


def test_a_bug_stops_the_others_too(ranks):
    """Its type and text are reported."""

    def body(rendezvous):
        if rendezvous.rank.rank == 0:
            raise KeyError("colour")
        rendezvous.barrier()

    _, heard = ranks(body)
    assert "rank 0 stopped the run" in heard.what
    assert "KeyError: 'colour'" in heard.why


def test_rank_0_goes_first(ranks):
    """The others do the work after it, and find what it left."""
    done = []

    def body(rendezvous):
        with rendezvous.first_process("the data"):
            if rendezvous.rank.rank == 0:
                time.sleep(0.2)
            done.append(rendezvous.rank.rank)
        return rendezvous.gather("together")

    assert ranks(body, 3) == [["together"] * 3] * 3
    assert done[0] == 0
    assert sorted(done) == [0, 1, 2]


def test_work_longer_than_the_timeout(ranks, monkeypatch):
    """Rank 0 may take its time, as long as it shows signs of life."""
    monkeypatch.setattr("lmcore.runtime.process.rendezvous._HEARTBEAT_SECONDS", 0.1)

    def body(rendezvous):
        rendezvous.barrier()
        with dataclasses.replace(rendezvous, timeout=0.5).first_process("the data"):
            if rendezvous.rank.rank == 0:
                time.sleep(1.2)
        return "done"

    assert ranks(body, timeout=60.0) == ["done", "done"]


def test_rank_0_fails_at_its_work(ranks):
    """The others hear of it, and do not begin."""
    begun = []

    def body(rendezvous):
        with rendezvous.first_process("the data"):
            begun.append(rendezvous.rank.rank)
            raise DataError("the corpus is cut off")

    first, second = ranks(body)
    assert isinstance(first, DataError)
    assert isinstance(second, OtherRankError)
    assert "the corpus is cut off" in second.why
    assert begun == [0]


@pytest.mark.parametrize("late, named", [(1, "rank 1"), (0, "rank 0")])
def test_a_rank_that_does_not_come_is_named(ranks, late, named, monkeypatch):
    """After the timeout everyone stops, and says for whom it waited, and at what."""
    monkeypatch.setattr("lmcore.runtime.process.rendezvous._VERDICT_SECONDS", 0.1)
    both = threading.Barrier(2)

    def body(rendezvous):
        try:
            if rendezvous.rank.rank != late:
                dataclasses.replace(rendezvous, timeout=0.5).barrier("the first step")
        finally:
            both.wait(60)

    found = ranks(body, timeout=60.0)
    (error,) = [one for one in found if one is not None]
    assert error.what == f"{named} did not answer within 0.5 s"
    assert "waited for the first step" in error.why


def test_a_process_that_never_starts_is_named(free_port):
    """Rank 0 of two, alone."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with (
        pytest.raises(RunError, match="rank 1 did not answer within") as caught,
        join_processes(RankInfo(0, 0, 2, 2), timeout=0.2, env=env),
    ):
        pass
    assert "waited for all processes of the run to start" in caught.value.why


def test_rank_0_that_never_starts_is_reported_with_its_address(free_port):
    """Rank 1 of two, alone."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with (
        pytest.raises(RunError, match=f"rank 1 of 2 cannot reach rank 0 at 127.0.0.1:{free_port}"),
        join_processes(RankInfo(1, 1, 2, 2), timeout=0.2, env=env),
    ):
        pass


def test_the_hint_for_another_secret_names_the_variable(free_port):
    """The address is right; the hosts have no common secret."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with (
        socket.create_server(("127.0.0.1", free_port)) as listener,
        serve_in_thread(listener, b"secret of another run"),
        pytest.raises(RunError, match="cannot reach rank 0") as caught,
        join_processes(RankInfo(1, 1, 2, 2), timeout=5.0, env=env),
    ):
        pass
    assert "another secret" in caught.value.why
    assert "set `LMCORE_SECRET` to the same value on all hosts" in caught.value.hint


def test_a_taken_port_is_reported():
    """Something else listens where rank 0 should."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with (
            pytest.raises(RunError, match="rank 0 of 2 cannot listen") as caught,
            join_processes(RankInfo(0, 0, 2, 2), timeout=1.0, env=env),
        ):
            pass
    assert "MASTER_PORT" in caught.value.hint


@pytest.mark.parametrize(
    "change, what",
    [
        ({"MASTER_ADDR": ""}, "`MASTER_ADDR` is not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "`MASTER_ADDR`, `MASTER_PORT`"),
        ({"MASTER_PORT": "http"}, "`MASTER_PORT=http` is not a port"),
        ({"MASTER_PORT": "0"}, "`MASTER_PORT=0` is not a port"),
        ({"MASTER_PORT": "65536"}, "`MASTER_PORT=65536` is not a port"),
    ],
)
def test_a_wrong_address_is_a_usage_error(change, what):
    """It is reported before anything is tried."""
    with (
        pytest.raises(ConfigError) as caught,
        join_processes(RankInfo(0, 0, 2, 2), timeout=1.0, env={**ADDRESS, **change}),
    ):
        pass
    assert what in caught.value.what


@pytest.mark.parametrize(
    "given, text",
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 2, 1, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_ranks_are_folded(given, text):
    """Neighbours are a range."""
    assert named_ranks(given) == text
