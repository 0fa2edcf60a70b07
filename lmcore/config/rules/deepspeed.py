"""Rules for the settings of the engine: what goes with `--engine deepspeed`, and what needs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from lmcore.config.load import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError, MissingPackageError

__all__ = ["DEEPSPEED_OPTIMIZERS", "DEEPSPEED_RULES", "accumulation"]

Problems = Iterator[LmcoreError]

DEEPSPEED_OPTIMIZERS = ("adam", "sgd", "adopt")
"""Those that update any part of a flat row of weights as they would within the whole."""

_ALONE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "data_parallel_replicas": 1,
}
"""Options that divide a model, and the value of each that divides nothing."""


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


def _installed(loaded: LoadedConfig) -> Problems:
    if loaded.value("engine") == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        yield MissingPackageError(
            "deepspeed", needed_for="`--engine deepspeed`", install="pip install deepspeed"
        )


def _goes_with(loaded: LoadedConfig) -> Problems:
    """DeepSpeed shards over data-parallel processes, and nothing else divides the model."""
    if loaded.value("engine") != "deepspeed":
        return
    shown = loaded.shown("engine")
    for name, plain in _ALONE.items():
        if name in loaded.options and loaded.value(name) != plain:
            yield ConfigError(
                f"{loaded.shown(name)} does not go with {shown}",
                why="DeepSpeed shards optimizer state, gradients and weights over all processes "
                "of the run; nothing else divides the model",
                hint=f"leave `--{name.replace('_', '-')}` out, or use `--engine native`",
            )
    if loaded.value("zero_stage") == 0:
        yield ConfigError(
            f"{loaded.shown('zero_stage')} does not go with {shown}",
            why="without sharding DeepSpeed does what torch's own engine does",
            hint="use 1, 2 or 3, or `--engine native`",
        )
    if loaded.value("optimizer") not in DEEPSPEED_OPTIMIZERS:
        yield ConfigError(
            f"{loaded.shown('optimizer')} does not go with {shown}",
            why="DeepSpeed gives each process a flat row of weights, in which no matrix is whole",
            hint=f"use {', '.join(f'`{one}`' for one in DEEPSPEED_OPTIMIZERS[:-1])} or "
            f"`{DEEPSPEED_OPTIMIZERS[-1]}`, or `--engine native`",
        )
    if loaded.value("compile") and loaded.value("zero_stage") == 3:
        yield ConfigError(
            f"{loaded.shown('compile')} does not go with ZeRO stage 3 of DeepSpeed",
            why="weights are gathered and released by hooks, which a compiled layer does not run",
            hint="leave `--compile` out, or use stage 2",
        )


def accumulation(loaded: LoadedConfig, data_parallel_size: int) -> Problems:
    """The numbers of samples in DeepSpeed's file must agree with each other and with ours."""
    steps, total = loaded.accumulation_steps, loaded.value("global_batch_size")
    if steps is None or total is None:
        return
    micro = loaded.value("micro_batch_size")
    together = micro * steps * data_parallel_size
    if together != total:
        yield ConfigError(
            f"{loaded.shown('global_batch_size')} is not {loaded.shown('micro_batch_size')} times "
            f"`gradient_accumulation_steps: {steps}` of {loaded.shown('deepspeed_config')} times "
            f"{data_parallel_size} processes, which is {together}",
            why="every process runs the same number of micro-batches in a step",
            hint=f"use `--global-batch-size {together}`, or leave `gradient_accumulation_steps` "
            "out of the file: it follows from the others",
        )


DEEPSPEED_RULES: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _native,
    _installed,
    _goes_with,
)
"""The rules that need nothing but the settings."""
