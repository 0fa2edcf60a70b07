"""Tensor-parallel parts of a parameter, joined to a tensor of lmcore and split from it.

Shapes: H hidden, F feed-forward channels, V rows of the embedding, N query heads, K heads of keys
and values, D channels of a head, T ranks.

parameter | on each rank
--- | ---
embeddings | V/T rows
`cross_attention.key_value` | K/T heads of keys and values, each as 2 D rows: key, value
`attention.qkv` | K/T heads of keys and values, each as (N/K + 2) D rows: queries, key, value
`feed_forward.up` | F/T rows; with a gate: its F/T rows, then F/T rows of the other projection; of
BigScience the other way round
`attention.output.weight`, `feed_forward.down.weight` | columns
norms, positions, biases of distances, biases of the two above | all of it
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, several
from lmcore.conversion.recipe import Recipe, grouped_qkv
from lmcore.conversion.state import WEIGHT
from lmcore.conversion.unread import same_values
from lmcore.model.family import parameters_of
from lmcore.model.parameters import Parameter, stored
from lmcore.model.shape import ModelShape

__all__ = ["Packing", "require_order"]

_CROSSED = ".cross_attention.key_value."
_OF_DISTANCES = ("encoder_bias.weight", "decoder_bias.weight")
_OLDEST, _OLD = 0.0, 1.0
"""Checkpoint versions whose rows of queries, keys and values have another order."""


@dataclass(frozen=True)
class Packing:
    """Rules that join the tensors of all ranks to one tensor of lmcore, and split it.

    Attributes:
        shape: Shape of the model.
        ranks: Number of ranks of tensor parallelism.
        version: Version of the checkpoint, which says how queries, keys and values are ordered.
        gate_last: True if a gate's rows follow the other projection's, as BigScience's
            `--glu-activation` has them; the shape of its other activations says so by itself.
    """

    shape: ModelShape
    ranks: int
    version: float = 3.0
    gate_last: bool = False

    @functools.cached_property
    def _table(self) -> dict[str, Parameter]:
        return {row.name: row for row in stored(parameters_of(self.shape))}

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank.

        Args:
            name: Name in lmcore.
        """
        size = list(self._table[name].shape)
        dim = self.split_dim(name)
        if dim is not None:
            size[dim] //= self.ranks
        return tuple(size)

    def split_dim(self, name: str) -> int | None:
        """Return the dim along which a parameter is split; None if every rank has all of it."""
        split = self._table[name].split
        # A bias for each head, [groups of distances, N], is computed on every rank and then split.
        return None if split is None or name.endswith(_OF_DISTANCES) else split.dim

    def replica_notes(self, parts: Mapping[str, Sequence[Tensor]], kind: str = WEIGHT) -> list[str]:
        """Return a note that names parameters whose replicas on the ranks have different values.

        Norms of long runs may drift apart, as their gradients are summed on each rank.

        Args:
            parts: Tensors of each parameter in the order of the ranks.
            kind: Kind of the tensors.
        """
        different = [
            name
            for name, held in parts.items()
            if self.split_dim(name) is None and not all(same_values(held[0], one) for one in held)
        ]
        what = "" if kind == WEIGHT else f"`{kind}` of "
        note = "the ranks of tensor parallelism have different values, of which the first rank's"
        return [f"{what}{several(different)}: {note} are read"] if different else []

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of lmcore from the tensors of all ranks.

        Args:
            name: Name of the parameter in lmcore.
            parts: Tensors in the order of the ranks, each [*part_shape*].
        """
        dim = self.split_dim(name)
        if dim is None:
            return parts[0]
        if self._gated(name):
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[side] for side in self._sides for half in halves])
        if (recipe := self._packed(name)) is not None:
            kinds = 2 if _CROSSED in name else 3
            return recipe.join([torch.cat([self._ordered(part, kinds) for part in parts])])
        return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]

    def split(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order, from the tensor of lmcore.

        Args:
            name: Name of the parameter in lmcore.
            tensor: Tensor of lmcore.
        """
        dim = self.split_dim(name)
        if dim is None:
            return [tensor] * self.ranks
        if self._gated(name):
            halves = tensor.chunk(2)
            first, second = (halves[side].chunk(self.ranks) for side in self._sides)
            return [torch.cat(pair) for pair in zip(first, second, strict=True)]
        if (recipe := self._packed(name)) is not None:
            tensor = recipe.split(tensor)[0]
        return list(tensor.chunk(self.ranks, dim))

    @property
    def _sides(self) -> tuple[int, int]:
        """Place in lmcore of the first half of a gated projection, and of the second."""
        return (1, 0) if self.gate_last or self.shape.glu_activation else (0, 1)

    def _gated(self, name: str) -> bool:
        """Return True if a parameter has the rows of a gate and of another projection."""
        split = self._table[name].split
        return ".feed_forward.up" in name and split is not None and len(split.groups) > 1

    def _packed(self, name: str) -> Recipe | None:
        """Return the recipe of packed keys and values, with queries or without; None of others."""
        if _CROSSED not in name and ".attention.qkv." not in name:
            return None
        shape = self.shape
        return grouped_qkv(
            name,
            self._table[name].shape,
            groups=shape.num_query_groups,
            queries=(
                0 if _CROSSED in name else shape.num_attention_heads // shape.num_query_groups
            ),
            channels=shape.head_dim,
        )

    def _ordered(self, part: Tensor, kinds: int) -> Tensor:
        """Return one rank's queries, keys and values by head, from the order of the version.

        Version 0 has all queries, all keys, all values of the rank; version 1 has, for each
        channel of each head, its query, its key and its value.  Of two kinds there are no queries.
        """
        heads, channels = self.shape.num_attention_heads // self.ranks, self.shape.head_dim
        if self.version == _OLDEST:
            by_kind = part.reshape(kinds, heads, channels, *part.shape[1:])
            return by_kind.transpose(0, 1).reshape(part.shape)
        if self.version == _OLD:
            by_channel = part.reshape(heads, channels, kinds, *part.shape[1:])
            return by_channel.transpose(1, 2).reshape(part.shape)
        return part


def require_order(checkpoint: Path, shape: ModelShape, version: float) -> None:
    """Raise a `CheckpointError` if a version does not say how grouped queries are ordered.

    Args:
        checkpoint: Directory of the checkpoint, for the message.
        shape: Shape of the model.
        version: Version of the checkpoint; 0 if it has none.
    """
    if version in {_OLDEST, _OLD} and shape.num_query_groups != shape.num_attention_heads:
        raise CheckpointError(
            f"`{checkpoint}` does not say how its queries, keys and values are ordered",
            why=f"its `checkpoint_version` is {version:g}{'' if version else ', or missing'}; "
            "versions before 2 have a key head for each query head, the model "
            f"{shape.num_query_groups} for {shape.num_attention_heads}",
            hint="save it again with the program that wrote it",
        )
