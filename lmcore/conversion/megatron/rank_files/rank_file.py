"""One rank's file of Megatron: the parts of the model that it holds, under lmcore's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lmcore.base.errors import CheckpointError
from lmcore.conversion.foreign_pickle.records import Record, load_content, values_of
from lmcore.conversion.megatron.parameters.names import (
    EMBEDDING,
    HEAD,
    TIED,
    UNUSED,
    parameter_of,
    stack_of,
)
from lmcore.conversion.megatron.run.saved_arguments import has_gates
from lmcore.conversion.unread import same_values
from lmcore.model.megatron_names import MegatronNames

__all__ = ["Part", "RankFile", "flat_tensors"]

_PLAIN = (str, int, float, bool, type(None))
_STATE = "_extra_state"
_VERSIONS = (0, 1.0, 2.0, 3.0, 4.0)
_FIRST = ("language_model", "word_embeddings_for_head")
"""Modules before megatron-core that are made first; the second is saved after the heads."""
_MAX_DEPTH = 32
"""Number of mappings around a tensor, at most; models have five."""


class Part:
    """One part of the model in a rank file: a stage, or one of several with a virtual pipeline.

    Attributes:
        tensors: Tensors by lmcore's names, with the number of their layer in this part.
        order: Names of all parameters in the order of Megatron's modules; `TIED` for the tied copy.
        foreign: Names in the file.
        copies: Weights of a tied output layer by their names in the file.
        buffers: Values that a model computes by itself, by their names in the file.
        surplus: Names in the file that no model of lmcore has.
        layers: Number of layers, of the longest stack.
        first_layer: Number of the first one in the whole model.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, Tensor]],
        names: MegatronNames,
        *,
        swiglu: bool,
        tied: bool,
    ) -> None:
        self._names = names
        self.tensors: dict[str, Tensor] = {}
        self.order: list[tuple[str, Tensor]] = []
        self.foreign: dict[str, str] = {}
        self.copies: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.surplus: list[str] = []
        self.first_layer = 0
        for name, tensor in sorted(tensors, key=_place):
            ours = parameter_of(name, swiglu=swiglu, names=names)
            if tied and ours == HEAD:
                ours = TIED
            if ours == UNUSED:
                self.buffers[name] = tensor
                continue
            if ours is None or (ours == TIED and not tied):
                self.surplus.append(name)
                continue
            if ours in self.tensors and same_values(tensor, self.tensors[ours]):
                continue  # a module that Megatron has under two names
            self.order.append((ours, tensor))
            if ours == TIED:
                self.copies[name] = tensor
                continue
            if ours in self.tensors:
                raise CheckpointError(
                    f"`{path}` has a parameter twice",
                    why=f"`{self.foreign[ours]}` and `{name}` are the same",
                )
            self.tensors[ours], self.foreign[ours] = tensor, name
        self.layers = self._count_layers(path)

    def _count_layers(self, path: Path) -> int:
        """Return the number of layers; raise a `CheckpointError` if one is missing."""
        held: dict[str, set[int]] = {}
        for name in self.tensors:
            if (place := stack_of(name, self._names)) is not None:
                held.setdefault(place[0], set()).add(place[1])
        for numbers in held.values():
            if numbers != set(range(len(numbers))):
                raise CheckpointError(
                    f"`{path}` does not have all of its layers",
                    why=f"layers {sorted(numbers)[:50]} are there",
                )
        return max(map(len, held.values()), default=0)

    @property
    def embedding(self) -> str:
        """Name of the token embedding, the first one if each of several encoders has one."""
        ending = f".{EMBEDDING}"
        return next((name for name in self.tensors if name.endswith(ending)), EMBEDDING)

    def take_copy(self) -> None:
        """Take the weight of the tied output layer as the token embedding, which is missing."""
        name, tensor = next(iter(self.copies.items()))
        self.tensors[EMBEDDING], self.foreign[EMBEDDING] = tensor, name
        self.order = [(EMBEDDING if one == TIED else one, held) for one, held in self.order]
        del self.copies[name]

    def global_name(self, name: str) -> str:
        """Return a name with the number of its layer in the whole model."""
        place = stack_of(name, self._names)
        if place is None:
            return name
        stack, layer, inside = place
        return f"{stack}.{self.first_layer + layer}.{inside}"

    def global_names(self) -> Sequence[tuple[str, str]]:
        """Return the name in the whole model and the name in this part of each tensor."""
        return [(self.global_name(name), name) for name in self.tensors]


def _place(tensor: tuple[str, Tensor]) -> int:
    """Return the place of a tensor's module among the models; tensors of one keep their order."""
    owner = tensor[0].partition(".")[0]
    return _FIRST.index(owner) if owner in _FIRST else len(_FIRST)


class RankFile:
    """File of one rank.

    Attributes:
        path: Path of the file.
        compare: True if the checksums of files of this rank are compared.
        content: Content of the file.
        args: Arguments of the run that wrote it.
        version: Version of the checkpoint.
        iteration: Number of steps done; None if the file does not say.
        parts: Parts of the model; empty before `open_parts`.
    """

    def __init__(self, path: Path, *, compare: bool = True) -> None:
        """Open the file, and compare its checksums if *compare* is true."""
        self.path, self.compare = path, compare
        self.content = load_content(path, compare=compare)
        args = values_of(self.content.get("args"))
        if args is None:
            raise CheckpointError(
                f"`{path}` does not say which model it has",
                why="it lacks the arguments of the run that wrote it",
            )
        self.args = args
        version = self.content.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version not in _VERSIONS:
            raise CheckpointError(
                f"`{path}` is of a version that lmcore does not know",
                why=f"`checkpoint_version` is `{version}`",
            )
        self.version = float(version)
        iteration = self.content.get("iteration", args.get("iteration"))
        self.iteration = iteration if type(iteration) is int and iteration >= 0 else None
        keys = ["model"] if "model" in self.content else []
        while not keys or f"model{len(keys)}" in self.content:
            key = f"model{len(keys)}"
            if key not in self.content:
                raise CheckpointError(f"`{path}` has no model")
            keys.append(key)
        self._tensors = [flat_tensors(path, self.content[key]) for key in keys]
        self.parts: list[Part] = []

    @property
    def names(self) -> list[str]:
        """Names of the tensors of all parts in the file."""
        return [name for part in self._tensors for name, _ in part]

    def open_parts(self, names: MegatronNames) -> None:
        """Set the parts, with lmcore's names.

        Args:
            names: Record of the model's family.

        Raises:
            CheckpointError: The file does not have all of its layers, or a parameter twice.
        """
        swiglu = has_gates(self.args)
        tied = not self.args.get("untie_embeddings_and_output_weights")
        self.parts = [
            Part(self.path, tensors, names, swiglu=swiglu, tied=tied) for tensors in self._tensors
        ]


def flat_tensors(path: Path, content: object) -> list[tuple[str, Tensor]]:
    """Return the tensors of nested mappings in their order, with their names joined by dots.

    States of FP8 kernels (`_extra_state`) that are no tensors are left out.

    Args:
        path: Path of the file, for messages.
        content: Mapping of names to tensors and further mappings.

    Raises:
        CheckpointError: It is no mapping, it is nested as no model is, or a value is no tensor.
    """
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` is damaged", why="its model is no mapping")
    return list(_flat(path, content, (), set()))


def _flat(
    path: Path, content: Mapping[Any, Any], outer: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a mapping that has the names *outer* in the mappings around it.

    In a file, a mapping can contain itself, or another one many times; *seen* are the known ones.
    """
    if id(content) in seen or len(outer) > _MAX_DEPTH:
        place = ".".join(outer)
        raise CheckpointError(
            f"`{path}` is damaged",
            why=f"its model is nested as no model is: `{place:.80}` is there twice, or too deep",
        )
    seen.add(id(content))
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(path, value, (*outer, str(name)), seen)
        elif isinstance(value, Tensor):
            yield ".".join((*outer, str(name))), value.detach()
        elif not isinstance(value, _PLAIN) and not str(name).endswith(_STATE):
            kind = value.kind if isinstance(value, Record) else type(value).__name__
            raise CheckpointError(
                f"`{'.'.join((*outer, str(name)))}` in `{path}` is no tensor",
                why=f"it is a `{kind}`, which lmcore does not read as a weight",
            )
