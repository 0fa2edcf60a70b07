"""Slurm's short forms of hosts and of counts."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.node_list import first_host, tasks_on_node


@pytest.mark.parametrize(
    "text, counts", [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x2)", [1, 2, 2])]
)
def test_tasks_of_each_node(text: str, counts: list[int]) -> None:
    """Counts are repeated as Slurm writes it, and end where the list does."""
    assert [tasks_on_node(text, node) for node in range(len(counts) + 1)] == [*counts, None]


@pytest.mark.parametrize(
    "text, host",
    [
        ("a", "a"),
        ("a[01-04]", "a01"),
        ("a[7,1-3]", "a7"),
        ("node-1,node-2", "node-1"),
        ("node-2,node-[1,3]", "node-2"),
        ("c[09-10]-ib,b2", "c09-ib"),
        ("gpu-[1-2]-[3-4]", "gpu-1-3"),
        ("gpu-[2,4-5]-[003-004,9].x,cpu[1-2]", "gpu-2-003.x"),
        ("r[1-2]c[3-4]n[05-10]", "r1c3n05"),
        ("[10-11]", "10"),
        (" a[1-2] , b ", "a1"),
        ("a[1-999999999999]", "a1"),
    ],
)
def test_first_hosts(text: str, host: str) -> None:
    """The first number of each pair of brackets is the first host's, with its zeros."""
    assert first_host(text) == host


@pytest.mark.parametrize(
    "text",
    ["", "a[", "a[1-]", "a]", "a b", "a[x]", "a[]", "a[1[2]]", "a[1-2-3]", "a,,b", "a,b[1-", "a,"],
)
def test_malformed_nodelists(text: str) -> None:
    """They are errors, even if the first host could be read."""
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        first_host(text)


@given(st.text(max_size=40) | st.text("ab[]-,01", max_size=40))
def test_any_text_ends(text: str) -> None:
    """Any text has a first host without brackets and commas, or is an error."""
    with contextlib.suppress(ConfigError):
        host = first_host(text)
        assert host
        assert not {*host} & {*"[], "}


def test_long_lists_take_linear_time() -> None:
    """A long list is read at once, and one that is malformed at its end is refused at once."""
    begin = time.process_time()
    for long in ("a," * 100_000, "a[1-2]," * 20_000, f"a[{'1,' * 100_000}2],", " a ," * 30_000):
        assert first_host(f"{long}b") in {"a", "a1"}
        with pytest.raises(ConfigError, match=r"\.\.\.`"):
            first_host(f"{long}b[")
    with pytest.raises(ConfigError, match=r"a\.\.\.`"):
        first_host("a" * 100_000 + "[1-" * 1000)
    assert time.process_time() - begin < 2
