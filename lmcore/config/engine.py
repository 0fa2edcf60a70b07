"""Training engine of a run: what it cannot do, and who trains then.

Megatron's forks start every run with `--deepspeed`, also with layouts that DeepSpeed's engine does
not run here.  The native engine trains these, with the settings of the same file.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lmcore.config.optimizers import optimizer_facts
from lmcore.config.settings import LoadedConfig, Provenance
from lmcore.model.training_engine import NATIVE, Lack, TrainingEngine, engine_named

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["beyond", "settle_engine"]

_MEGATRON_FLAG = "--deepspeed"
_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "data_parallel_replicas",
)


def beyond(engine: TrainingEngine, config: Config) -> dict[str, Lack]:
    """Return the options whose values an engine cannot have, each with the reason.

    Args:
        engine: The engine.
        config: Settings of a run, which may be another engine's.
    """
    found: dict[str, Lack] = {}
    if not engine.by_layout:
        shards = Lack(
            f"{engine.title} shards optimizer state, gradients and weights over all processes of "
            "the run; nothing else divides the model"
        )
        found = {name: shards for name in _SIZES if getattr(config.parallel, name) > 1}
        if config.parallel.zero_stage == 0:
            found["zero_stage"] = Lack(
                f"without sharding {engine.title} does what torch's own engine does",
                "use `--zero-stage 1`, `2` or `3`",
            )
        asked = config.optimizer
        facts = optimizer_facts(asked.optimizer, elementwise=asked.optimizer_elementwise)
        if facts.needs_whole:
            found["optimizer"] = Lack(f"{engine.title} shards parameters, and {facts.needs_whole}")
    return found | dict(engine.lacks(config))


def settle_engine(loaded: LoadedConfig) -> tuple[LoadedConfig, str | None]:
    """Return the settings with the engine of the run, and a line about it if it is not the asked.

    `--deepspeed` alone leaves the native engine what DeepSpeed's cannot do; `--engine deepspeed`
    does not.

    Args:
        loaded: Settings from all sources.
    """
    if loaded.provenance["engine"] != Provenance("flag", _MEGATRON_FLAG):
        return loaded, None
    engine = engine_named(loaded.config.parallel.engine)
    lacking = beyond(engine, loaded.config)
    if not lacking:
        return loaded, None
    shown = ", ".join(loaded.shown(name) for name in lacking)
    parallel = dataclasses.replace(loaded.config.parallel, engine=NATIVE.name)
    origin = Provenance("derived", f"{_MEGATRON_FLAG}, but {engine.title}'s engine lacks {shown}")
    settled = dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, parallel=parallel),
        provenance={**loaded.provenance, "engine": origin},
    )
    file = loaded.config.parallel.deepspeed_config
    settings = f" with the settings of `{file}`" if file else ""
    return settled, (
        f"`{_MEGATRON_FLAG}`: the native engine trains this run{settings}; {engine.title}'s engine "
        f"does not run {shown} here"
    )
