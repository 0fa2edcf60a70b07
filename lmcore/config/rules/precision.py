"""Rules for the loss scale of fp16."""

from __future__ import annotations

from lmcore.config.rules.common import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["PRECISION_RULES"]


def _loss_scale(loaded: LoadedConfig) -> Problems:
    accelerator = loaded.config.accelerator
    if not accelerator.loss_scale and accelerator.initial_loss_scale < accelerator.min_loss_scale:
        yield ConfigError(
            f"{loaded.shown('initial_loss_scale')} is less than {loaded.shown('min_loss_scale')}",
            why="the scale never falls below its minimum",
            hint="use a smaller `--min-loss-scale`; 1 is the default",
        )


PRECISION_RULES: tuple[Rule, ...] = (_loss_scale,)
