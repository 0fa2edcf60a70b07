"""`MegatronNames`: what only one family has in Megatron's checkpoints.  Torch-free.

A family names its record in `Family.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcore.model.family import families, family_of
from lmcore.model.shape import ModelShape

__all__ = ["MegatronNames", "Stack", "every_family", "names_for", "names_of_tensors"]

_FORMAT = "megatron"
Sizes = Mapping[str, tuple[int, ...]]


class Stack(NamedTuple):
    """Stack of layers of a model.

    Attributes:
        core: Name in megatron-core; empty: it does not have the model.
        legacy: Name in the models before megatron-core.
        norm: Module of lmcore that follows the layers and that Megatron counts to the stack.
        crossed: True if the layers attend to the states of another stack.
    """

    core: str
    legacy: str = "language_model.encoder"
    norm: str = "final_norm"
    crossed: bool = False


@dataclass(frozen=True)
class MegatronNames:
    """Names of parameters outside the layers, and arguments of a run.

    Keys of the tables are modules of lmcore, or whole names of parameters.  `core` and `legacy` are
    in the order in which Megatron makes the parameters, which its optimizer counts.

    Attributes:
        core: Names in megatron-core.
        legacy: Names in the models before megatron-core.
        older: Keys of `core` by names of further versions.
        stacks: Stacks of layers by the beginning of the names of their parameters in lmcore, in
            the order in which Megatron makes them.
        aliases: Second names that megatron-core has for modules, by their names in `core`.
        states: Modules outside the layers for which megatron-core looks for a state beside the
            weights in `torch_dist`.
        matches: Returns True if a checkpoint with these names of parameters is of this family;
            None: it is taken if no other one is.
        values: Returns values of the shape, from the arguments of a run and the tensors' shapes.
        arguments: Returns the further arguments of a run that trains a model of this family.
        flags: Returns the further flags that Megatron needs for a model of this family.
        differences: Returns the features of a model that Megatron lacks, by the set of names.
    """

    core: Mapping[str, str]
    legacy: Mapping[str, str]
    older: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=lambda: {"blocks": Stack("decoder")})
    aliases: Mapping[str, str] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    matches: Callable[[Collection[str]], bool] | None = None
    values: Callable[[Mapping[str, Any], Sizes], dict[str, Any]] = lambda _args, _sizes: {}
    arguments: Callable[[ModelShape], dict[str, Any]] = lambda _shape: {}
    flags: Callable[[ModelShape], list[str]] = lambda _shape: []
    differences: Callable[[ModelShape, str], list[str]] = lambda _shape, _style: []

    def second_name(self, name: str) -> str | None:
        """Return the other name that megatron-core has for a parameter; None if there is none.

        Args:
            name: Name in megatron-core.
        """
        module, _, parameter = name.rpartition(".")
        return f"{self.aliases[module]}.{parameter}" if module in self.aliases else None


def every_family() -> tuple[MegatronNames, ...]:
    """Return the records of all families, each once."""
    found: list[MegatronNames] = []
    for family in families().values():
        names = family.load_names(_FORMAT)
        if names is not None and names not in found:
            found.append(names)
    return tuple(found)


def names_for(shape: ModelShape) -> MegatronNames | None:
    """Return the record of a model's family; None if it has none."""
    found: MegatronNames | None = family_of(shape).load_names(_FORMAT)
    return found


def names_of_tensors(names: Collection[str]) -> MegatronNames:
    """Return the record of the family that tensors are of.

    Args:
        names: Names of the tensors in Megatron, of all parts of the model.
    """
    records = every_family()
    chosen = (one for one in records if one.matches is not None and one.matches(names))
    return next(chosen, next(one for one in records if one.matches is None))
