"""Rules for tasks that score the model in training."""

from __future__ import annotations

from lmcore.base.errors import ConfigError
from lmcore.config.derived.model_math import family_name
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.model.family import families

__all__ = ["EVALUATION_RULES"]

_INPUTS = {"tokens_BS", "targets_BS", "loss_weight_BS"}
"""Tensors of a micro-batch of models that predict each token from those before it."""


def _family(loaded: LoadedConfig) -> Problems:
    """Require a model that predicts each token from the tokens before it, and nothing else."""
    if not loaded.config.evaluation.eval_tasks:
        return
    name = family_name(loaded.config.model)
    if not name:
        return
    family, task = families()[name], loaded.config.task.task
    if task is None and set(family.batch) - family.optional == _INPUTS:
        return
    kind = f"models with a head for the task `{task}`" if task else f"{name} models"
    yield ConfigError(
        f"{loaded.shown('eval_tasks')} cannot score {kind}",
        why="the tasks ask for the probability of each token after those before it",
        hint=loaded.removal("eval_tasks"),
    )


def _positions(loaded: LoadedConfig) -> Problems:
    """Require that the longest sequence of a task can be divided as in training."""
    if not loaded.config.evaluation.eval_tasks:
        return
    sizes, model = loaded.config.parallel, loaded.config.model
    tensor, context = sizes.tensor_model_parallel_size, sizes.context_parallel_size
    parts = tensor if sizes.sequence_parallel else 1
    parts *= 2 * context if context > 1 else 1
    positions = model.max_position_embeddings or model.seq_length
    if positions % parts:
        yield ConfigError(
            f"{loaded.shown('eval_tasks')} cannot score a model of {positions} positions that cuts "
            f"each sequence into {parts} parts",
            why="a task may have an example with as many tokens as the model has positions",
            hint=f"use `--max-position-embeddings {-(-positions // parts) * parts}`, or "
            f"{loaded.removal('eval_tasks')}",
        )


EVALUATION_RULES: tuple[Rule, ...] = (_family, _positions)
