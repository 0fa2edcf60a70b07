"""Ranks that wait for a rank which never begins their call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcore.library import ending
from lmcore.runtime.process.watch import Watch


@pytest.mark.parametrize(
    "call, operations, is_ahead",
    [
        ((1, "`save`"), {}, False),
        ((2, "`save`"), {}, False),
        ((2, "`backward`"), {}, True),
        ((3, "`save`"), {}, True),
        ((2, "`save`"), {"1 data": 5}, True),
        # Messages between two other ranks of the default group
        ((2, "`save`"), {"0 default_pg": 9, "3 undefined": 9}, False),
    ],
)
def test_a_rank_is_ahead_in_another_or_a_later_call(monkeypatch, call, operations, is_ahead):
    """Calls are counted in the same order on all ranks, messages to single ranks are not."""
    own = {"0 default_pg": 4, "1 data": 4, "3 undefined": 1}
    monkeypatch.setattr(ending, "count_operations", lambda: own)
    watch = Watch(0, 2, store=None)
    watch.check_order = lambda *_: None
    watch.begin_call("`barrier`")
    assert watch.begin_call("`save`")[:2] == ("`save`", 2)
    signs = {1: {"call": call, "operations": operations}}
    found = ending._ahead(signs, SimpleNamespace(watch=watch))
    assert found == ([1] if is_ahead else [])
