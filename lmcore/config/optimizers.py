"""What is known of each optimizer before one is made: its options, and what sharding it bears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lmcore.config.layout import ParallelLayout
from lmcore.config.load import LoadedConfig
from lmcore.config.section import run_options
from lmcore.errors import ConfigError, LmcoreError

__all__ = [
    "OPTIMIZERS",
    "OptimizerFacts",
    "Sharding",
    "optimizer_layout_problems",
    "optimizer_problems",
]

Sharding = Literal["elementwise", "norms", "whole"]
"""What an optimizer can do with a part of a parameter: "elementwise": update it as it would within
the whole; "norms": so, if sums over the parts are provided; "whole": nothing, it needs it all."""

_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        sharding: What it can do with parts of parameters.
        options: Options that it reads, beside learning rate, decay and clipping.
        needs_whole: Why it needs whole parameters, where it does.
        samples_labels: Whether it draws labels from the model's predictions, for which a process
            needs the whole model's scores.
    """

    sharding: Sharding
    options: tuple[str, ...]
    needs_whole: str = ""
    samples_labels: bool = False


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adam": OptimizerFacts("elementwise", _ADAM),
    "sgd": OptimizerFacts("elementwise", ("sgd_momentum",)),
    "lamb": OptimizerFacts("norms", _ADAM),
    "muon": OptimizerFacts(
        "whole",
        (*_ADAM, "muon_momentum", "muon_nesterov", "muon_num_ns_steps"),
        "it orthogonalizes whole matrices",
    ),
    "sophia": OptimizerFacts(
        "elementwise",
        ("sophiag_beta1", "sophiag_beta2", "sophiag_rho", "sophiag_hessian_interval"),
        samples_labels=True,
    ),
    "adopt": OptimizerFacts("elementwise", _ADAM),
    "shampoo": OptimizerFacts(
        "whole",
        (
            *_ADAM,
            "shampoo_eps",
            "shampoo_max_preconditioner_dim",
            "shampoo_precondition_frequency",
        ),
        "its preconditioners are made of whole matrices",
    ),
    "schedulefree": OptimizerFacts("elementwise", _ADAM),
    "adam8bit": OptimizerFacts("whole", _ADAM, "blocks of 256 numbers share a scale"),
}


def optimizer_problems(loaded: LoadedConfig) -> Iterator[LmcoreError]:
    """Yield the options that were given to another optimizer than theirs.

    Those that repeat their default do no harm: every run's `config.yaml` does.
    """
    chosen = loaded.value("optimizer")
    has = OPTIMIZERS[chosen].options
    known = run_options()
    for name in dict.fromkeys(name for one in OPTIMIZERS.values() for name in one.options):
        user_gave = loaded.provenance[name].kind in {"file", "flag"}
        if name in has or not user_gave or loaded.value(name) == known[name].default:
            continue
        owners = ", ".join(f"`{other}`" for other, one in OPTIMIZERS.items() if name in one.options)
        own = ", ".join(f"`--{one.replace('_', '-')}`" for one in has)
        yield ConfigError(
            f"{loaded.shown(name)} does not go with {loaded.shown('optimizer')}",
            why=f"it is an option of {owners}; `{chosen}` has {own}",
            hint=f"leave `--{name.replace('_', '-')}` out, or choose another `--optimizer`",
        )


def optimizer_layout_problems(
    loaded: LoadedConfig, layout: ParallelLayout
) -> Iterator[LmcoreError]:
    """Yield why the optimizer cannot train a model that is divided as *layout* says."""
    chosen = loaded.value("optimizer")
    facts = OPTIMIZERS[chosen]
    dividing = []
    if layout.tensor > 1 and (facts.needs_whole or facts.samples_labels):
        dividing.append("tensor_model_parallel_size")
    if layout.zero_stage and facts.needs_whole:
        names = ("zero_stage", "use_distributed_optimizer")
        dividing += [name for name in names if loaded.value(name)] or ["zero_stage"]
    if facts.samples_labels:
        axes = {
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
        }
        dividing += [name for name, size in axes.items() if size > 1]
    if not dividing:
        return
    others = ", ".join(f"`{name}`" for name in _suitable())
    yield ConfigError(
        f"{loaded.shown('optimizer')} does not go with "
        + " and ".join(loaded.shown(name) for name in dividing),
        why=facts.needs_whole
        or "it draws labels from the scores over the whole vocabulary, of whole sequences",
        hint=f"use one of {others}, or leave "
        + " and ".join(f"`--{name.replace('_', '-')}`" for name in dividing)
        + " out",
    )


def _suitable() -> list[str]:
    """Return the optimizers that any layout goes with."""
    return [n for n, one in OPTIMIZERS.items() if not (one.needs_whole or one.samples_labels)]
