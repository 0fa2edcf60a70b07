"""Validation of a run's settings: every rule once, every problem at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.config.layout import ParallelLayout
from lmcore.config.load import LoadedConfig
from lmcore.config.rules.all import problems_of
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["ValidConfig", "validate"]


@dataclass(frozen=True)
class ValidConfig:
    """Settings that fit each other and the number of processes; `validate` alone makes it.

    Attributes:
        loaded: The settings and where they come from.
        layout: How the processes divide the model and the samples.
    """

    loaded: LoadedConfig
    layout: ParallelLayout


def validate(
    loaded: LoadedConfig, *, world_size: int = 1, further: Sequence[LmcoreError] = ()
) -> ValidConfig:
    """Check settings against each other and the number of processes.

    Args:
        loaded: The settings, as `load_config` returned them.
        world_size: Number of processes of the run.
        further: Problems found elsewhere, to be raised with those found here.

    Raises:
        LmcoreError: Every problem; a `ConfigError` if there are several.
    """
    problems = [*loaded.problems, *problems_of(loaded, world_size=world_size), *further]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError.collect(problems)
    return ValidConfig(loaded, ParallelLayout.of(loaded.config, world_size))
