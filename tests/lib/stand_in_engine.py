"""A record in place of DeepSpeed's, whose plugin is not installed where the core is tested."""

from __future__ import annotations

import pytest

from lmcore.model.training_engine import TrainingEngine, engines

__all__ = ["stand_in_for_deepspeed"]

_RECORD = TrainingEngine(
    name="deepspeed",
    title="DeepSpeed",
    open="nowhere:open_engine",
    compiles=lambda config: config.parallel.zero_stage != 3,
    offloads=True,
    takes_file=True,
)


def stand_in_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add `--engine deepspeed` for a test that builds no engine."""
    monkeypatch.setitem(engines(), _RECORD.name, _RECORD)
