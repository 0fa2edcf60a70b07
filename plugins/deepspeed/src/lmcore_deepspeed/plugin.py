"""The hooks of DeepSpeed's engine and checkpoints, and the record of the engine; torch-free."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, LmcoreError, MissingPackageError
from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl
from lmcore.model.training_engine import Lack, TrainingEngine
from lmcore_deepspeed.checkpoint import FORMAT

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.config.settings import LoadedConfig
    from lmcore.contract.registry import EngineRegistry, FormatRegistry

__all__ = ["ENGINE"]

_OPTIMIZERS = ("adam", "sgd", "adopt")
"""Optimizers that update any slice of the flat buffer of weights like the whole parameter."""


def _lacks(config: Config) -> dict[str, Lack]:
    """Return the options whose values DeepSpeed cannot have here."""
    if config.optimizer.optimizer in _OPTIMIZERS:
        return {}
    *most, last = _OPTIMIZERS
    whole = Lack(
        "DeepSpeed gives each process a slice of a flat buffer, not whole matrices",
        f"use `--optimizer {'`, `'.join(most)}` or `{last}`",
    )
    return {"optimizer": whole}


def _compiles(config: Config) -> bool:
    """Return False in stage 3, whose hooks gather and free weights: compiled blocks run none."""
    return config.parallel.zero_stage != 3


def _rules(loaded: LoadedConfig) -> Iterator[LmcoreError]:
    parallel = loaded.config.parallel
    if importlib.util.find_spec("deepspeed") is None:
        problem = MissingPackageError(
            "deepspeed", needed_for="`--engine deepspeed`", install="pip install deepspeed"
        )
        offload = " without `--cpu-offload`" * parallel.cpu_offload  # the native engine has none
        problem.hint = f"{problem.hint}, or use `--engine native`{offload}"
        yield problem
    if loaded.config.training.compile and not _compiles(loaded.config):
        yield ConfigError(
            f"{loaded.shown('compile')} cannot be combined with ZeRO stage 3 of DeepSpeed",
            why="hooks gather and release the weights, and a compiled layer does not run hooks",
            hint="remove `--compile`, or use `--zero-stage 2`",
        )


ENGINE = TrainingEngine(
    name="deepspeed",
    title="DeepSpeed",
    open="lmcore_deepspeed.engine:open_deepspeed_engine",
    lacks=_lacks,
    rules=_rules,
    compiles=_compiles,
    offloads=True,
    takes_file=True,
)


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="deepspeed",
        api=">=1.3,<2",
        summary="training by DeepSpeed, `--engine deepspeed`, and its checkpoints",
    )


@hookimpl
def lmcore_add_engines(registry: EngineRegistry) -> None:
    """Add `--engine deepspeed`."""
    registry.add(ENGINE)


@hookimpl
def lmcore_add_formats(registry: FormatRegistry) -> None:
    """Add `--to megatron-deepspeed`."""
    registry.add(FORMAT)
