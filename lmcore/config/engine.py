"""Training engine of a run: what DeepSpeed's cannot do, and who trains then.

Megatron's forks start every run with `--deepspeed`, also with layouts that DeepSpeed's engine does
not run here.  The native engine trains these, with the settings of the same file.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lmcore.config.settings import LoadedConfig, Provenance

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["DEEPSPEED_OPTIMIZERS", "beyond_deepspeed", "settle_engine"]

DEEPSPEED_OPTIMIZERS = ("adam", "sgd", "adopt")
"""Optimizers that update any slice of the flat buffer of weights like the whole parameter."""

_MEGATRON_FLAG = "--deepspeed"
_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "data_parallel_replicas",
)


def beyond_deepspeed(config: Config) -> dict[str, str]:
    """Return the options whose values DeepSpeed's engine cannot have, each with the reason."""
    parallel = config.parallel
    found = {
        name: "DeepSpeed shards optimizer state, gradients and weights over all processes of the "
        "run; nothing else divides the model"
        for name in _SIZES
        if getattr(parallel, name) > 1
    }
    if parallel.zero_stage == 0:
        found["zero_stage"] = "without sharding DeepSpeed does what torch's own engine does"
    if config.optimizer.optimizer not in DEEPSPEED_OPTIMIZERS:
        found["optimizer"] = (
            "DeepSpeed gives each process a slice of a flat buffer, not whole matrices"
        )
    return found


def settle_engine(loaded: LoadedConfig) -> tuple[LoadedConfig, str | None]:
    """Return the settings with the engine of the run, and a line about it if it is not the asked.

    `--deepspeed` alone leaves the native engine what DeepSpeed's cannot do; `--engine deepspeed`
    does not.

    Args:
        loaded: Settings from all sources.
    """
    asked = loaded.provenance["engine"] == Provenance("flag", _MEGATRON_FLAG)
    beyond = beyond_deepspeed(loaded.config) if asked else {}
    if not beyond:
        return loaded, None
    shown = ", ".join(loaded.shown(name) for name in beyond)
    parallel = dataclasses.replace(loaded.config.parallel, engine="native")
    origin = Provenance("derived", f"{_MEGATRON_FLAG}, but DeepSpeed's engine lacks {shown}")
    settled = dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, parallel=parallel),
        provenance={**loaded.provenance, "engine": origin},
    )
    file = loaded.config.parallel.deepspeed_config
    settings = f" with the settings of `{file}`" if file else ""
    return settled, (
        f"`{_MEGATRON_FLAG}`: the native engine trains this run{settings}; DeepSpeed's engine does "
        f"not run {shown} here"
    )
