"""Fixtures of the tests of lmcore and of its plugins that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from suite.trials import remember_trials
from suite.warm import check_open

__all__ = ["no_waiting_for_the_disk", "one_trial_of_each_plugin", "shared_data"]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Replace `os.fsync` in this process, as in processes that fork from `suite.warm`.

    No test cuts the power, and a third of a tiny run is spent in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check_open)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_trial_of_each_plugin() -> None:
    """Try installed plugins once in this process; see `suite.trials`."""
    remember_trials()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of corpora, tokenizers and foreign files, `shared/data` beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}")
    return folder
