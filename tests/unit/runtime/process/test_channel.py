"""Exchanges beside the rendezvous: answers, failures that all hear of, ranks that do not come."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from lmcore.base.errors import CheckpointError, OtherRankError, RunError
from lmcore.runtime.process import rendezvous as rendezvous_module
from lmcore.runtime.process.channel import Channel


def test_each_rank_gets_its_answer(ranks):
    """Rank 0 sees all parts in order and answers each one, again and again; notes do not stay."""

    def body(rendezvous):
        channel, me = Channel(rendezvous), rendezvous.rank.rank
        found = [
            channel.exchange(
                lambda turn=turn: [me, turn],
                lambda parts: [sum(r for r, _ in parts) * 10 + rank for rank, _ in parts],
                "sums",
            )
            for turn in range(3)
        ]
        rendezvous.barrier()
        return found, rendezvous.store.count()

    found = ranks(body, 3)
    assert [answers for answers, _ in found] == [[30, 30, 30], [31, 31, 31], [32, 32, 32]]

    def more(rendezvous):
        channel = Channel(rendezvous)
        for _ in range(30):
            channel.exchange(lambda: 0, lambda parts: parts, "nothing")
        rendezvous.barrier()
        return rendezvous.store.count()

    assert max(ranks(more, 3)) < 40


def test_alone():
    """A single process answers itself, and undoes what fails."""
    assert Channel(None).exchange(lambda: 2, lambda parts: [parts[0] + 1], "x") == 3
    undone = []
    with pytest.raises(KeyError):
        Channel(None).exchange(lambda: {}["a"], list, "x", undo=lambda: undone.append(1))
    assert undone == [1]


def test_from_a_thread(ranks):
    """A thread of each rank exchanges while the others use the rendezvous, in any order."""

    def body(rendezvous):
        me, answers = rendezvous.rank.rank, []
        channel = Channel(rendezvous)

        def behind():
            time.sleep(0.05 * me)
            answers.extend(
                channel.exchange(lambda: me, lambda parts: [parts] * len(parts), "behind")
                for _ in range(5)
            )

        thread = threading.Thread(target=behind)
        thread.start()
        notes = [rendezvous.gather((me, turn)) for turn in range(20)]
        thread.join()
        return answers, notes

    for answers, notes in ranks(body, 3):
        assert answers == [[0, 1, 2]] * 5
        assert notes == [[[rank, turn] for rank in range(3)] for turn in range(20)]


@pytest.mark.parametrize("victim", [0, 1, "combine"])
def test_a_failure_is_everyones(ranks, victim):
    """The one that fails keeps its own error, the others get its words, after it was undone."""
    undone = []

    def body(rendezvous):
        channel, me = Channel(rendezvous), rendezvous.rank.rank

        def work():
            if me == victim:
                raise CheckpointError("the disk is full", why="0 bytes", hint="free some")
            return me

        def combine(parts):
            if victim == "combine":
                raise CheckpointError("the disk is full", why="0 bytes", hint="free some")
            return parts

        try:
            channel.exchange(work, combine, "a save", undo=lambda: undone.append(me))
        except (CheckpointError, OtherRankError) as error:
            first = error, list(undone)
        return first, channel.exchange(lambda: me, lambda parts: parts, "the next one")

    found = ranks(body, 3, timeout=60.0)
    cause = 0 if victim == "combine" else victim
    for rank, ((error, seen), after) in enumerate(found):
        assert after == rank
        assert seen == [0]
        assert (error.why, error.hint) == ("0 bytes", "free some")
        if rank == cause:
            assert isinstance(error, CheckpointError)
        else:
            assert isinstance(error, OtherRankError)
            assert error.what == f"rank {cause}: the disk is full"


def test_a_bug_is_reported_too(ranks):
    """Its type and text."""

    def body(rendezvous):
        channel, me = Channel(rendezvous), rendezvous.rank.rank
        channel.exchange(lambda: [1, 2][me + 1], lambda parts: parts, "x")

    first, second = ranks(body)
    assert isinstance(second, IndexError)
    assert "rank 1: IndexError: list index out of range" in first.what


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come(ranks, absent, monkeypatch):
    """It is named after the timeout."""
    monkeypatch.setattr(rendezvous_module, "_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous_module, "_VERDICT_SECONDS", 0.5)
    others = threading.Barrier(3)

    def body(rendezvous):
        rendezvous.barrier()  # from here on all are awake
        channel = Channel(dataclasses.replace(rendezvous, timeout=1.0))
        try:
            if rendezvous.rank.rank != absent:
                channel.exchange(lambda: 0, lambda parts: parts, "a save")
        finally:
            others.wait(60)

    found = ranks(body, 3, timeout=60.0)
    waiting = [one for rank, one in enumerate(found) if rank != absent]
    assert all(isinstance(one, RunError) for one in waiting)
    assert any(f"rank {absent}" in one.render() for one in waiting)
    assert "did not answer within 1 s" in waiting[0].render()


def test_long_work_is_waited_for(ranks, monkeypatch):
    """Work that takes longer than the timeout shows signs of life, on any rank."""
    monkeypatch.setattr(rendezvous_module, "_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous_module, "_VERDICT_SECONDS", 0.1)

    def body(rendezvous):
        rendezvous.barrier()
        channel = Channel(dataclasses.replace(rendezvous, timeout=0.5))
        me = rendezvous.rank.rank

        def work():
            time.sleep(0.8 if me else 0.0)
            return me

        def combine(parts):
            time.sleep(1.0)
            return parts

        return channel.exchange(work, combine, "a save")

    assert ranks(body, 2, timeout=60.0) == [0, 1]


def test_a_failure_elsewhere_is_heard(ranks):
    """A rank that waits in an exchange is notified of a stopped rank long before its time limit."""

    def body(rendezvous):
        channel = Channel(rendezvous)
        if rendezvous.rank.rank == 1:
            raise CheckpointError("weights are not finite")
        channel.exchange(lambda: 0, lambda parts: parts, "a save")

    began = time.monotonic()
    first, second, third = ranks(body, 3, timeout=60.0)
    assert time.monotonic() - began < 20
    assert isinstance(second, CheckpointError)
    assert "weights are not finite" in first.why
    assert isinstance(third, OtherRankError)
