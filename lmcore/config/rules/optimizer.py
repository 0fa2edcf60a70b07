"""Rules for the optimizer: its own options, and layouts that it can train."""

from __future__ import annotations

from lmcore.config.layout import ParallelLayout
from lmcore.config.optimizers import OPTIMIZERS
from lmcore.config.option import flag_of
from lmcore.config.rules.common import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["OPTIMIZER_RULES", "optimizer_layout_problems"]


def _options(loaded: LoadedConfig) -> Problems:
    """Refuse options of another optimizer, unless they repeat the default.

    The `config.yaml` of every run repeats the defaults of all options.
    """
    chosen = loaded.config.optimizer.optimizer
    own = OPTIMIZERS[chosen].options
    for name in dict.fromkeys(name for facts in OPTIMIZERS.values() for name in facts.options):
        by_user = loaded.provenance[name].kind in {"file", "flag"}
        if name in own or not by_user or loaded.value(name) == loaded.options[name].default:
            continue
        owners = ", ".join(
            f"`{other}`" for other, facts in OPTIMIZERS.items() if name in facts.options
        )
        own_flags = ", ".join(f"`{flag_of(option)}`" for option in own)
        yield ConfigError(
            f"{loaded.shown(name)} does not go with {loaded.shown('optimizer')}",
            why=f"it is an option of {owners}; `{chosen}` has {own_flags}",
            hint=f"leave `{flag_of(name)}` out, or choose another `--optimizer`",
        )


OPTIMIZER_RULES: tuple[Rule, ...] = (_options,)


def optimizer_layout_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Yield why the optimizer cannot train a model that is divided as *layout* says."""
    facts, parallel = OPTIMIZERS[loaded.config.optimizer.optimizer], loaded.config.parallel
    dividing = []
    if layout.tensor > 1 and (facts.needs_whole or facts.samples_labels):
        dividing.append("tensor_model_parallel_size")
    if layout.zero_stage and facts.needs_whole:
        given = {
            "zero_stage": parallel.zero_stage,
            "use_distributed_optimizer": parallel.use_distributed_optimizer,
        }
        dividing += [name for name, value in given.items() if value] or ["zero_stage"]
    if facts.samples_labels:
        axes = {
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
        }
        dividing += [name for name, size in axes.items() if size > 1]
    if not dividing:
        return
    suitable = [
        f"`{name}`"
        for name, other in OPTIMIZERS.items()
        if not (other.needs_whole or other.samples_labels)
    ]
    yield ConfigError(
        f"{loaded.shown('optimizer')} does not go with "
        + " and ".join(loaded.shown(name) for name in dividing),
        why=facts.needs_whole
        or "it samples labels from the logits of the whole vocabulary and of whole sequences",
        hint=f"use one of {', '.join(suitable)}, or leave "
        + " and ".join(f"`{flag_of(name)}`" for name in dividing)
        + " out",
    )
