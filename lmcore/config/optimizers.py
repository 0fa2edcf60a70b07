"""Facts about each optimizer: its options, and how its parameters may be sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["IMPORT_PATH", "OPTIMIZERS", "OptimizerFacts", "Sharding", "optimizer_facts"]

Sharding = Literal["elementwise", "norms", "whole"]
"""Ways in which an optimizer can update a shard of a parameter.

"elementwise": like the whole parameter; "norms": like the whole, given norms that are summed over
the shards; "whole": not at all, it needs whole parameters."""

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Pattern of the import path of a class, "module:Class"."""

_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about one optimizer.

    Attributes:
        sharding: Update of a shard of a parameter that it supports.
        options: Options that it reads, besides learning rate, weight decay and clipping.
        needs_whole: Why it needs whole parameters; empty if it does not.
        samples_labels: True if it samples labels from the model's predictions, for which a
            process needs the logits of the whole model.
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
        "its preconditioners need whole matrices",
    ),
    "schedulefree": OptimizerFacts("elementwise", _ADAM),
    "adam8bit": OptimizerFacts("whole", _ADAM, "blocks of 256 values share a scale"),
}


_IMPORTED = ("optimizer_args", "optimizer_elementwise")


def optimizer_facts(name: str, *, elementwise: bool = False) -> OptimizerFacts:
    """Return the facts about an optimizer.

    Args:
        name: Name of one of `OPTIMIZERS`, or an import path "module:Class".
        elementwise: True if the user says that an imported optimizer is elementwise.
    """
    if ":" not in name:
        return OPTIMIZERS[name]
    if elementwise:
        return OptimizerFacts("elementwise", _IMPORTED)
    return OptimizerFacts(
        "whole",
        _IMPORTED,
        "it may need whole parameters; `--optimizer-elementwise` says that it does not",
    )
