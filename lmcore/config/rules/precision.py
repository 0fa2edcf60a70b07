"""Rules for the loss scale of fp16."""

from __future__ import annotations

from lmcore.config.rules.common import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["DYNAMIC_SCALE", "PRECISION_RULES"]

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Options of a dynamic loss scale."""


def _loss_scale(loaded: LoadedConfig) -> Problems:
    accelerator = loaded.config.accelerator
    if accelerator.loss_scale:
        for name in DYNAMIC_SCALE:
            if loaded.value(name) != loaded.options[name].default:
                yield ConfigError(
                    f"{loaded.shown(name)} does not go with {loaded.shown('loss_scale')}",
                    why="a fixed loss scale never changes",
                    hint="keep one of them",
                )
    elif accelerator.initial_loss_scale < accelerator.min_loss_scale:
        yield ConfigError(
            f"{loaded.shown('initial_loss_scale')} is less than {loaded.shown('min_loss_scale')}",
            why="the scale never falls below its minimum",
            hint="use a smaller `--min-loss-scale`; 1 is the default",
        )


PRECISION_RULES: tuple[Rule, ...] = (_loss_scale,)
