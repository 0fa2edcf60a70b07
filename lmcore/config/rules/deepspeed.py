"""Rules for `--engine deepspeed`."""

from __future__ import annotations

import importlib.util

from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError, MissingPackageError

__all__ = ["DEEPSPEED_OPTIMIZERS", "DEEPSPEED_RULES"]

DEEPSPEED_OPTIMIZERS = ("adam", "sgd", "adopt")
"""Optimizers that update any slice of the flat buffer of weights like the whole parameter."""


def _installed(loaded: LoadedConfig) -> Problems:
    if loaded.config.parallel.engine != "deepspeed":
        return
    if importlib.util.find_spec("deepspeed") is None:
        yield MissingPackageError(
            "deepspeed", needed_for="`--engine deepspeed`", install="pip install deepspeed"
        )


def _goes_with(loaded: LoadedConfig) -> Problems:
    """Refuse what DeepSpeed cannot do here; it only shards over data-parallel processes."""
    config, parallel = loaded.config, loaded.config.parallel
    if parallel.engine != "deepspeed":
        return
    shown = loaded.shown("engine")
    sizes = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "data_parallel_replicas": parallel.data_parallel_replicas,
    }
    for name, size in sizes.items():
        if size > 1:
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with {shown}",
                why="DeepSpeed shards optimizer state, gradients and weights over all processes "
                "of the run; nothing else divides the model",
                hint=f"leave `{flag_of(name)}` out, or use `--engine native`",
            )
    if parallel.zero_stage == 0:
        yield ConfigError(
            f"{loaded.shown('zero_stage')} cannot be combined with {shown}",
            why="without sharding DeepSpeed does what torch's own engine does",
            hint="use 1, 2 or 3, or `--engine native`",
        )
    if config.optimizer.optimizer not in DEEPSPEED_OPTIMIZERS:
        yield ConfigError(
            f"{loaded.shown('optimizer')} cannot be combined with {shown}",
            why="DeepSpeed gives each process a slice of a flat buffer, not whole matrices",
            hint=f"use {', '.join(f'`{name}`' for name in DEEPSPEED_OPTIMIZERS[:-1])} or "
            f"`{DEEPSPEED_OPTIMIZERS[-1]}`, or `--engine native`",
        )
    if config.training.compile and parallel.zero_stage == 3:
        yield ConfigError(
            f"{loaded.shown('compile')} cannot be combined with ZeRO stage 3 of DeepSpeed",
            why="hooks gather and release the weights, and a compiled layer does not run hooks",
            hint="leave `--compile` out, or use stage 2",
        )


DEEPSPEED_RULES: tuple[Rule, ...] = (_installed, _goes_with)
