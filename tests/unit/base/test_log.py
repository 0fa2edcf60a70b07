"""Lines of the log: which ranks they name."""

from __future__ import annotations

import logging

import pytest

from lmcore.base import log


@pytest.mark.parametrize(
    "rank,shown", [(0, "note\nwarning: much\n"), (1, "[rank 1] warning: much\n")]
)
def test_only_other_ranks_are_named(
    rank: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines of rank 0 have no mark; other ranks write warnings only, with their rank."""
    try:
        log.configure(rank=rank, world_size=2)
        logging.getLogger("lmcore.test").info("note")
        logging.getLogger("lmcore.test").warning("much")
        assert capfd.readouterr().err == shown
    finally:
        log.configure()


@pytest.mark.parametrize("rank,shown", [(0, "warning: much\n"), (1, "")])
def test_a_warning_of_all_ranks_is_shown_once(
    rank: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 shows it for all."""
    try:
        log.configure(rank=rank, world_size=2)
        logging.getLogger("lmcore.test").warning("much", extra=log.ALL_RANKS)
        assert capfd.readouterr().err == shown
    finally:
        log.configure()
