"""Fixtures of a tiny model, and of a run directory that holds it."""

from __future__ import annotations

from tiny_run import _processor, model, ops, run_directory, runtime

__all__ = ["_processor", "model", "ops", "run_directory", "runtime"]
