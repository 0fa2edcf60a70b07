"""Facts about each optimizer: how its parameters may be sharded."""

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


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about one optimizer.

    Attributes:
        sharding: Update of a shard of a parameter that it supports.
        needs_whole: Why it needs whole parameters; empty if it does not.
        samples_labels: True if it samples labels from the model's predictions, for which a
            process needs the logits of the whole model.
    """

    sharding: Sharding
    needs_whole: str = ""
    samples_labels: bool = False


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adam": OptimizerFacts("elementwise"),
    "sgd": OptimizerFacts("elementwise"),
    "lamb": OptimizerFacts("norms"),
    "muon": OptimizerFacts(
        "whole",
        "it orthogonalizes whole matrices",
    ),
    "sophia": OptimizerFacts(
        "elementwise",
        samples_labels=True,
    ),
    "adopt": OptimizerFacts("elementwise"),
    "shampoo": OptimizerFacts(
        "whole",
        "its preconditioners need whole matrices",
    ),
    "schedulefree": OptimizerFacts("elementwise"),
    "adam8bit": OptimizerFacts("whole", "blocks of 256 values share a scale"),
}


def optimizer_facts(name: str, *, elementwise: bool = False) -> OptimizerFacts:
    """Return the facts about an optimizer.

    Args:
        name: Name of one of `OPTIMIZERS`, or an import path "module:Class".
        elementwise: True if the user says that an imported optimizer is elementwise.
    """
    if ":" not in name:
        return OPTIMIZERS[name]
    if elementwise:
        return OptimizerFacts("elementwise")
    return OptimizerFacts(
        "whole",
        "it may need whole parameters; `--optimizer-elementwise` says that it does not",
    )
