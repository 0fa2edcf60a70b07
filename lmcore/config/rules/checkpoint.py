"""Rules for loading a checkpoint."""

from __future__ import annotations

from lmcore.config.rules.common import Problems, Rule, exclude_each_other
from lmcore.config.settings import LoadedConfig

__all__ = ["CHECKPOINT_RULES"]


def _schedule(loaded: LoadedConfig) -> Problems:
    return exclude_each_other(
        loaded, "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"
    )


CHECKPOINT_RULES: tuple[Rule, ...] = (_schedule,)
