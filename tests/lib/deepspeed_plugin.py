"""The plugin `lmcore-deepspeed`, for a test from its sources where it is not installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from example_plugins import installed

from lmcore.plugin import discover

SOURCES = Path(__file__).resolve().parents[2] / "plugins/deepspeed/src"


@contextmanager
def with_deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Add its engine and its format, in this process and in processes that a test starts.

    Args:
        tmp_path_factory: Fixture of that name.
        monkeypatch: Fixture of that name.
    """
    try:
        importlib.metadata.distribution("lmcore-deepspeed")
    except importlib.metadata.PackageNotFoundError:
        site = tmp_path_factory.mktemp("site")
        installed("lmcore_deepspeed", "deepspeed", SOURCES, site, monkeypatch)
    discover(probe=False)
    yield
