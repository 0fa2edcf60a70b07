"""Facts about each optimizer: how its parameters may be sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["IMPORT_PATH", "OPTIMIZERS", "OptimizerFacts", "optimizer_facts"]

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""Pattern of the import path of a class, "module:Class"."""


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about one optimizer.

    Attributes:
        needs_whole: Why it needs whole parameters; empty if it can update shards.
        samples_labels: True if it samples labels from the model's predictions, for which a
            process needs the logits of the whole model.
    """

    needs_whole: str = ""
    samples_labels: bool = False


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "adam": OptimizerFacts(),
    "sgd": OptimizerFacts(),
    "lamb": OptimizerFacts(),
    "muon": OptimizerFacts("it orthogonalizes whole matrices"),
    "sophia": OptimizerFacts(samples_labels=True),
    "adopt": OptimizerFacts(),
    "shampoo": OptimizerFacts("its preconditioners need whole matrices"),
    "schedulefree": OptimizerFacts(),
    "adam8bit": OptimizerFacts("blocks of 256 values share a scale"),
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
        return OptimizerFacts()
    return OptimizerFacts(
        "it may need whole parameters; `--optimizer-elementwise` says that it does not"
    )
