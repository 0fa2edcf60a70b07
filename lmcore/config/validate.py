"""Validation of a run's settings: every rule once, every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.rules import Problems, Rule
from lmcore.config.rules.checkpoint import CHECKPOINT_RULES, PATH_RULES
from lmcore.config.rules.data import DATA_RULES, TOKENIZER_RULES
from lmcore.config.rules.evaluation import EVALUATION_RULES
from lmcore.config.rules.model import MODEL_RULES, TASK_RULES
from lmcore.config.rules.needs import NEED_RULES
from lmcore.config.rules.optimizer import OPTIMIZER_RULES
from lmcore.config.rules.parallel import (
    ENGINE_RULES,
    PARALLEL_RULES,
    data_parallel_size,
    layout_problems,
    world_size_problem,
)
from lmcore.config.rules.training import (
    TRAINING_RULES,
    batch_size_problems,
    profile_problems,
    train_iters,
    with_micro_batch,
)
from lmcore.config.settings import LoadedConfig, readable

__all__ = ["RULES", "ValidConfig", "problems_of", "settled", "validate"]

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *TRAINING_RULES,
    *OPTIMIZER_RULES,
    *TOKENIZER_RULES,
    *DATA_RULES,
    *TASK_RULES,
    *EVALUATION_RULES,
    *ENGINE_RULES,
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
    loaded: LoadedConfig,
    *,
    world_size: int = 1,
    further: Sequence[LmcoreError] = (),
    processes_hint: Callable[[int], str] | None = None,
) -> ValidConfig:
    """Check settings against each other and the number of processes.

    Args:
        loaded: The settings, as `load_config` returned them.
        world_size: Number of processes of the run.
        further: Problems found elsewhere, to be raised together with those found here.
        processes_hint: As in `problems_of`.

    Raises:
        LmcoreError: The only problem; if there are several, a `ConfigError` with all of them.
    """
    loaded = settled(loaded, world_size)
    found = problems_of(loaded, world_size=world_size, processes_hint=processes_hint)
    problems = [*found, *further]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError.collect(problems)
    return ValidConfig(loaded, ParallelLayout.of(loaded.config, world_size))


def settled(loaded: LoadedConfig, world_size: int) -> LoadedConfig:
    """Return the settings with the values that follow from the number of processes.

    Args:
        loaded: The settings.
        world_size: Number of processes of the run.
    """
    if loaded.unread:
        return loaded
    data = data_parallel_size(loaded, world_size)
    return loaded if data is None else with_micro_batch(loaded, data)


def problems_of(
    loaded: LoadedConfig,
    *,
    world_size: int | None,
    processes_hint: Callable[[int], str] | None = None,
) -> list[LmcoreError]:
    """Return every problem of the settings, in the order of the rules.

    Rules that need a setting which could not be read are left out.

    Args:
        loaded: The settings.
        world_size: Number of processes; None if it is not known yet, which leaves out the rules
            that depend on it, but for batch sizes that fit no number.
        processes_hint: Returns how to start a multiple of its argument, for a command whose
            processes another option counts than `--nproc-per-node`; None: that option.
    """
    if world_size is not None:
        loaded = settled(loaded, world_size)
    found = [*loaded.problems]
    for rule in RULES:
        found += readable(rule(loaded))
    found += readable(_profile(loaded, world_size))
    of_number = _of_one(loaded)
    if world_size is not None:
        of_number = _of_processes(loaded, world_size, processes_hint)
    return [*found, *readable(of_number)]


def _profile(loaded: LoadedConfig, world_size: int | None) -> Problems:
    data = None if world_size is None else data_parallel_size(loaded, world_size)
    steps = train_iters(loaded, data)
    yield from profile_problems(loaded, world_size=world_size, train_iters=steps)


def _of_one(loaded: LoadedConfig) -> Problems:
    """Yield what fits no number of processes, as it does not fit one."""
    if loaded.accumulation_steps is None:  # else the micro-batch size may follow from the number
        yield from batch_size_problems(loaded, 1)


def _of_processes(
    loaded: LoadedConfig, world_size: int, processes_hint: Callable[[int], str] | None
) -> Problems:
    """Yield what does not fit the number of processes."""
    data = data_parallel_size(loaded, world_size)
    if data is None:
        yield world_size_problem(loaded, world_size, processes_hint)
        return
    yield from readable(_layout(loaded, world_size))
    yield from batch_size_problems(loaded, data)


def _layout(loaded: LoadedConfig, world_size: int) -> Problems:
    yield from layout_problems(loaded, ParallelLayout.of(loaded.config, world_size))
