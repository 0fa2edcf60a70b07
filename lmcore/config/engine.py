"""Training engine of a run: what it cannot do, and who trains then.

Megatron's forks start every run with the flag of another engine, also with layouts that it does
not run here.  The native engine trains these, with the settings of the same file.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lmcore.config.foreign.megatron import ENGINE_FLAG
from lmcore.config.optimizers import optimizer_facts
from lmcore.config.settings import LoadedConfig, Provenance
from lmcore.model.training_engine import (
    NATIVE,
    Lack,
    TrainingEngine,
    absent_plugins,
    engine_named,
    engines,
)

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["beyond", "offloading", "settle_engine"]

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


def offloading() -> dict[str, str]:
    """Return the engines that keep optimizer state in host memory, by the name of each.

    The value is text to follow its flag in hints: what brings it, if it is not installed.
    """
    found = {name: "" for name, engine in engines().items() if engine.offloads}
    return found | {
        one.engine: f" (of `lmcore[{one.extra}]`)"
        for one in absent_plugins()
        if "--cpu-offload" in one.flags
    }


def settle_engine(loaded: LoadedConfig) -> tuple[LoadedConfig, str | None]:
    """Return the settings with the engine of the run, and a line about it if it is not the asked.

    The flag of Megatron's forks alone leaves the native engine what its engine cannot do;
    `--engine` does not.

    Args:
        loaded: Settings from all sources.
    """
    if loaded.provenance["engine"] != Provenance("flag", ENGINE_FLAG):
        return loaded, None
    engine = engine_named(loaded.config.parallel.engine)
    lacking = beyond(engine, loaded.config)
    if not lacking:
        return loaded, None
    shown = ", ".join(loaded.shown(name) for name in lacking)
    parallel = dataclasses.replace(loaded.config.parallel, engine=NATIVE.name)
    origin = Provenance("derived", f"{ENGINE_FLAG}, but {engine.title}'s engine lacks {shown}")
    settled = dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, parallel=parallel),
        provenance={**loaded.provenance, "engine": origin},
    )
    file = loaded.config.parallel.engine_file
    settings = f" with the settings of `{file}`" if file else ""
    return settled, (
        f"`{ENGINE_FLAG}`: the native engine trains this run{settings}; {engine.title}'s engine "
        f"does not run {shown} here"
    )
