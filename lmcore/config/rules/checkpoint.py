"""Rules for loading a checkpoint."""

from __future__ import annotations

from lmcore.config.rules.common import Problems, Rule, exclude_each_other
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["CHECKPOINT_RULES"]


def _schedule(loaded: LoadedConfig) -> Problems:
    return exclude_each_other(
        loaded, "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"
    )


def _finetune(loaded: LoadedConfig) -> Problems:
    checkpoint = loaded.config.checkpoint
    if checkpoint.finetune and checkpoint.load is None:
        yield ConfigError(
            f"{loaded.shown('finetune')} needs `--load`",
            why="fine-tuning starts from a checkpoint's weights",
            hint="add `--load DIR`",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (_schedule, _finetune)
