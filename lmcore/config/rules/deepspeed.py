"""Rules for `--engine deepspeed`, and for what the native engine lacks of it."""

from __future__ import annotations

import importlib.util

from lmcore.config.engine import DEEPSPEED_OPTIMIZERS, beyond_deepspeed
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError, MissingPackageError

__all__ = ["DEEPSPEED_RULES"]


def _installed(loaded: LoadedConfig) -> Problems:
    parallel = loaded.config.parallel
    if parallel.engine != "deepspeed":
        return
    if importlib.util.find_spec("deepspeed") is None:
        problem = MissingPackageError(
            "deepspeed", needed_for="`--engine deepspeed`", install="pip install deepspeed"
        )
        problem.hint = f"{problem.hint}, or {_native(loaded)}"
        yield problem


def _native(loaded: LoadedConfig) -> str:
    """Return the flag that selects the native engine, for hints; it has no offload."""
    offload = " without `--cpu-offload`" * loaded.config.parallel.cpu_offload
    return f"use `--engine native`{offload}"


def _goes_with(loaded: LoadedConfig) -> Problems:
    """Refuse what DeepSpeed cannot do here; it only shards over data-parallel processes."""
    config, parallel = loaded.config, loaded.config.parallel
    if parallel.engine != "deepspeed":
        return
    *most, last = DEEPSPEED_OPTIMIZERS
    instead = {
        "zero_stage": "use `--zero-stage 1`, `2` or `3`",
        "optimizer": f"use `--optimizer {'`, `'.join(most)}` or `{last}`",
    }
    for name, why in beyond_deepspeed(config).items():
        yield ConfigError(
            f"{loaded.shown(name)} cannot be combined with {loaded.shown('engine')}",
            why=why,
            hint=f"{instead.get(name) or loaded.removal(name)}, or {_native(loaded)}",
        )
    if config.training.compile and parallel.zero_stage == 3:
        yield ConfigError(
            f"{loaded.shown('compile')} cannot be combined with ZeRO stage 3 of DeepSpeed",
            why="hooks gather and release the weights, and a compiled layer does not run hooks",
            hint="remove `--compile`, or use `--zero-stage 2`",
        )


def _offload(loaded: LoadedConfig) -> Problems:
    """Refuse state in host memory with the native engine."""
    parallel = loaded.config.parallel
    if parallel.engine == "deepspeed" or not parallel.cpu_offload:
        return
    others = [loaded.shown(name) for name in beyond_deepspeed(loaded.config)]
    lacks = f", and DeepSpeed's does not run {' and '.join(others)} here" if others else ""
    yield ConfigError(
        f"{loaded.shown('cpu_offload')} needs `--engine deepspeed`",
        why=f"the native engine keeps the optimizer's state on the device{lacks}",
        hint=loaded.removal("cpu_offload") + ("" if others else ", or use `--engine deepspeed`"),
    )


DEEPSPEED_RULES: tuple[Rule, ...] = (_installed, _goes_with, _offload)
