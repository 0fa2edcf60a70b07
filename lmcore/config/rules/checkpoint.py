"""Rules for the checkpoint to load."""

from __future__ import annotations

from lmcore.config.checkpoint_step import checkpoint_step
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["CHECKPOINT_RULES"]


def _step(loaded: LoadedConfig) -> Problems:
    """Require a number or `best`."""
    step = loaded.config.checkpoint.ckpt_step
    try:
        if step is not None:
            checkpoint_step(step)
    except ConfigError as problem:
        yield problem


CHECKPOINT_RULES: tuple[Rule, ...] = (_step,)
