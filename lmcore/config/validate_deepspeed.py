"""Rules for the settings of the engine: what goes with `--engine deepspeed`, and what needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lmcore.config.load import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["DEEPSPEED_RULES"]

Problems = Iterator[LmcoreError]


def _native(loaded: LoadedConfig) -> Problems:
    """What only DeepSpeed reads is refused elsewhere."""
    if loaded.value("engine") == "deepspeed":
        return
    for name in ("deepspeed_config", "cpu_offload"):
        if loaded.value(name):
            yield ConfigError(
                f"{loaded.shown(name)} needs `--engine deepspeed`",
                why="torch's own engine does not read it",
                hint="add `--engine deepspeed`, or leave it out",
            )
    if loaded.value("zero_stage"):
        yield ConfigError(
            f"{loaded.shown('zero_stage')} needs `--engine deepspeed`",
            why="torch's own engine does not shard in this version",
            hint="add `--engine deepspeed`, or use 0",
        )


DEEPSPEED_RULES: tuple[Callable[[LoadedConfig], Problems], ...] = (_native,)
"""The rules that need nothing but the settings."""
