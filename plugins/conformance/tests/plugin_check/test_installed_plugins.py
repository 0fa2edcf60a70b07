"""`lmcore plugin check` on plugins by somebody else: built as wheels, installed, checked."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def environment(throwaway_environment):
    """An environment with the kit, a good plugin, a broken one, a stale one, one that crashes."""
    throwaway_environment.see("lmcore_conformance", "lmcore-conformance")
    return throwaway_environment


@pytest.mark.parametrize(
    "name, status, message",
    [
        ("goodchip", 0, "layer_norm"),
        ("broken", 1, "libfrobnicate.so.7"),
        ("stale", 1, ">=0.3,<1"),
        ("crashing", 1, "SIGSEGV"),
        ("nosuch", 2, "lmcore-nosuch"),
    ],
)
def test_authors_can_check_theirs(environment, name, status, message):
    """`lmcore plugin check` passes the good one and says what is wrong with the others."""
    found = environment.run("plugin", "check", f"lmcore-{name}")
    assert found.returncode == status, found.stdout + found.stderr
    assert message in found.stdout + found.stderr
