"""Shapes of passes: by the length of a request alone, and no request is left out."""

from __future__ import annotations

import random

import pytest

from lmcore.evaluation.passes import Pending, Scored, Shapes


@pytest.mark.parametrize(
    "length,width", [(1, 16), (16, 16), (17, 32), (128, 128), (129, 144), (257, 288), (900, 960)]
)
def test_widths(length: int, width: int) -> None:
    assert Shapes(512, 2048).width(length) == width


def test_widths_end_with_the_positions() -> None:
    shapes = Shapes(512, 900)
    assert [shapes.width(one) for one in (820, 850, 900)] == [832, 896, 900]
    assert (shapes.rows(900), shapes.rows(16)) == (1, 32)
    assert [shapes.answer_width(one) for one in (0, 3, 5, 9, 17)] == [0, 4, 8, 16, 32]


@pytest.mark.parametrize("tokens", [1, 300, 10_000])
def test_pending_requests(tokens: int) -> None:
    """Each request is in one pass, of the right width, for any number that may wait."""
    source = random.Random(1)
    pending: Pending[int] = Pending(Shapes(64, 100), tokens)
    asked = [Scored((1,) * source.randint(1, 90), (number,)) for number in range(200)]
    passes = [one for n, each in enumerate(asked) for one in pending.add(n, each)]
    before = len(passes)
    passes += pending.flush()
    assert sorted(key for keys, _ in passes for key in keys) == list(range(200))
    for keys, one in passes:
        assert [asked[key] for key in keys] == list(one.requests)
        assert {Shapes(64, 100).width(each.length) for each in one.requests} == {one.width}
        assert len(keys) <= one.rows == max(1, 64 // one.width)
    # all that waits is of this many tokens at most
    waiting = sum(len(one.requests) * one.width for _, one in passes[before:])
    assert waiting <= tokens


def test_answers_that_have_no_positions() -> None:
    """A context whose padding leaves no room for padded answers is not computed once."""
    shapes = Shapes(512, 64)
    assert shapes.may_share([Scored((1,) * 40, (1, 2, 3))])
    assert shapes.may_share([Scored((1,) * 60, (1,))])
    assert not shapes.may_share([Scored((1,) * 60, (1, 2))])
