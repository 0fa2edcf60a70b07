"""Types and a rule that the rules of several subjects share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["Problems", "Rule", "exclude_each_other"]

Problems = Iterator[LmcoreError]
"""Problems of a rule: one for each violation, none if the settings are right."""

Rule = Callable[[LoadedConfig], Problems]
"""A rule that needs only the settings."""


def exclude_each_other(loaded: LoadedConfig, first: str, second: str) -> Problems:
    """Yield a problem if two options are both set."""
    if all(loaded.value(name) not in (None, 0, ()) for name in (first, second)):
        yield ConfigError(
            f"{loaded.shown(first)} and {loaded.shown(second)} exclude each other",
            hint="keep one of them",
        )
