"""Rules for the checkpoint to load."""

from __future__ import annotations

from lmcore.base.errors import ConfigError
from lmcore.config.checkpoint_step import checkpoint_step
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig

__all__ = ["CHECKPOINT_RULES"]


def _step(loaded: LoadedConfig) -> Problems:
    """Require a number or `best`."""
    step = loaded.config.checkpoint.ckpt_step
    try:
        if step is not None:
            checkpoint_step(step)
    except ConfigError as problem:
        yield problem


def _keep_every(loaded: LoadedConfig) -> Problems:
    """Require that there are checkpoints of the steps to keep."""
    checkpoint = loaded.config.checkpoint
    every, interval = checkpoint.keep_every, checkpoint.save_interval
    if every and interval and every % interval:
        yield ConfigError(
            f"{loaded.shown('keep_every')} is not a multiple of {loaded.shown('save_interval')}",
            why="other steps have no checkpoint that could be kept",
            hint=f"use `--keep-every {-(-every // interval) * interval}`",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (_step, _keep_every)
