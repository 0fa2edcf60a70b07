"""Validation of a run's settings: every rule once, every problem at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.rules import Rule
from lmcore.config.rules.checkpoint import CHECKPOINT_RULES
from lmcore.config.rules.data import DATA_RULES
from lmcore.config.rules.deepspeed import DEEPSPEED_RULES
from lmcore.config.rules.model import MODEL_RULES
from lmcore.config.rules.needs import NEED_RULES
from lmcore.config.rules.optimizer import OPTIMIZER_RULES
from lmcore.config.rules.parallel import (
    PARALLEL_RULES,
    data_parallel_size,
    layout_problems,
    world_size_problem,
)
from lmcore.config.rules.paths import PATH_RULES
from lmcore.config.rules.profile import profile_problems
from lmcore.config.rules.tokenizer import TOKENIZER_RULES
from lmcore.config.rules.training import TRAINING_RULES, batch_size_problems, train_iters
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["RULES", "ValidConfig", "problems_of", "validate"]

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *TRAINING_RULES,
    *OPTIMIZER_RULES,
    *TOKENIZER_RULES,
    *DATA_RULES,
    *DEEPSPEED_RULES,
    *PARALLEL_RULES,
    *PATH_RULES,
    *CHECKPOINT_RULES,
    *NEED_RULES,
)
"""Rules that need only the settings, in the order in which problems are shown."""


@dataclass(frozen=True)
class ValidConfig:
    """Settings that fit each other and the number of processes; `validate` alone makes it.

    Attributes:
        loaded: The settings and their provenance.
        layout: Parallel layout of the processes.
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
        further: Problems found elsewhere, to be raised together with those found here.

    Raises:
        LmcoreError: The only problem; if there are several, a `ConfigError` with all of them.
    """
    problems = [*problems_of(loaded, world_size=world_size), *further]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError.collect(problems)
    return ValidConfig(loaded, ParallelLayout.of(loaded.config, world_size))


def problems_of(loaded: LoadedConfig, *, world_size: int | None) -> list[LmcoreError]:
    """Return every problem of the settings, in the order of the rules.

    Args:
        loaded: The settings.
        world_size: Number of processes; None if it is not known yet, which leaves out the rules
            that depend on it.
    """
    found = [*loaded.problems]
    found += [problem for rule in RULES for problem in rule(loaded)]
    found += profile_problems(loaded, world_size=world_size, train_iters=train_iters(loaded))
    if world_size is None:
        return found
    data = data_parallel_size(loaded, world_size)
    if data is None:
        return [*found, world_size_problem(loaded, world_size)]
    found += layout_problems(loaded, ParallelLayout.of(loaded.config, world_size))
    return [*found, *batch_size_problems(loaded, data)]
