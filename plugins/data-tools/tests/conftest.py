"""Installs the plugin from its sources for each test, where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from bpe_files import write_bpe_files
from example_plugins import installed
from suite.fixtures import no_waiting_for_the_disk, one_trial_of_each_plugin, shared_data

__all__ = ["no_waiting_for_the_disk", "one_trial_of_each_plugin", "shared_data"]

SOURCES = Path(__file__).resolve().parents[1] / "src"

if importlib.util.find_spec("lmcore_data_tools") is None:
    sys.path.insert(0, str(SOURCES))  # for the modules of tests, which import it


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds `lmcore data clean` and `lmcore data train-tokenizer`."""
    try:
        distribution("lmcore-data-tools")
    except PackageNotFoundError:
        site = tmp_path_factory.mktemp("site")
        installed("lmcore_data_tools", "data-tools", SOURCES, site, monkeypatch)


@pytest.fixture
def bpe_files(tmp_path: Path) -> tuple[Path, Path]:
    """A `vocab.json` of 265 tokens and its `merges.txt`."""
    return write_bpe_files(tmp_path)
