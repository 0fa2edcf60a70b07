"""Installs the plugin from its sources for each test, where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest
from deepspeed_plugin import SOURCES, with_deepspeed

if importlib.util.find_spec("lmcore_deepspeed") is None:
    sys.path.insert(0, str(SOURCES))  # for the modules of tests, which import it


@pytest.fixture(autouse=True)
def plugin(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds `--engine deepspeed` and `--to megatron-deepspeed`."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture
def package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets settings be checked without DeepSpeed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
