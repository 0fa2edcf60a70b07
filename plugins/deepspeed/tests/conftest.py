"""Adds the engine from its sources where the plugin is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("lmcore_deepspeed") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from lmcore.model.training_engine import engines
from lmcore_deepspeed.plugin import ENGINE


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds `--engine deepspeed`; DeepSpeed need not be there for settings to be checked."""
    monkeypatch.setitem(engines(), ENGINE.name, ENGINE)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
