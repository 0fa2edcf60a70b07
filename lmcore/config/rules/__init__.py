"""Validation rules, one file for each subject; `lmcore.config.validate` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lmcore.base.errors import LmcoreError

if TYPE_CHECKING:
    from lmcore.config.settings import LoadedConfig

__all__ = ["Problems", "Rule"]

Problems = Iterator[LmcoreError]
"""Problems of a rule: one for each violation, none if the settings are right."""

Rule = Callable[["LoadedConfig"], Problems]
"""A rule that needs only the settings."""
