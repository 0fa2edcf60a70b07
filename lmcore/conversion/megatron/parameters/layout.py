"""Parallel layouts of Megatron: which rank has which parameters, in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.base.errors import CheckpointArgumentError
from lmcore.conversion.megatron.parameters.names import EMBEDDING, HEAD, TIED, foreign_name
from lmcore.model.family import parameter_shapes
from lmcore.model.megatron_names import MegatronNames, names_for
from lmcore.model.shape import ModelShape

__all__ = ["Layout", "in_order", "outside_layers"]

_COPY = "word_embeddings_for_head.weight"
"""Name of the copy of a tied token embedding before megatron-core."""
_ORDER = {
    "core": (
        "attention.output",
        "attention_norm",
        "attention.qkv",
        "feed_forward_norm",
        "feed_forward.up",
        "feed_forward.down",
    ),
    "core-local": (
        "attention_norm",
        "attention.output",
        "attention.qkv",
        "feed_forward_norm",
        "feed_forward.up",
        "feed_forward.down",
    ),
    "legacy": (
        "attention_norm",
        "attention.qkv",
        "attention.output",
        "feed_forward_norm",
        "feed_forward.up",
        "feed_forward.down",
    ),
}
"""Order in which Megatron's layers make their parameters, which its optimizer counts."""


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a checkpoint.

    Attributes:
        tensor: Number of ranks of tensor parallelism.
        pipeline: Number of stages of the pipeline.
        virtual: Number of parts of the model on each stage.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1

    def layers(self, count: int, stage: int, part: int) -> range:
        """Return the numbers of the layers of one part.

        Args:
            count: Number of layers of the model.
            stage: Stage of the pipeline.
            part: Part on the stage.
        """
        size = count // (self.pipeline * self.virtual)
        first = (part * self.pipeline + stage) * size
        return range(first, first + size)

    def parameters(
        self, shape: ModelShape, stage: int, part: int, style: str
    ) -> list[tuple[str, str]]:
        """Return the parameters of one part by their names in Megatron and in lmcore, in order.

        A tied copy of the token embedding has the name of the embedding.

        Args:
            shape: Shape of the model.
            stage: Stage of the pipeline.
            part: Part on the stage.
            style: Set of names, one of `STYLES`.
        """
        layers = self.layers(shape.num_layers, stage, part)
        table, names = names_for(shape), list(parameter_shapes(shape))
        before, after = outside_layers(shape, style, copy=shape.tied and self.pipeline > 1)
        found: list[tuple[str, str]] = []
        if stage == part == 0:
            found += [(foreign_name(name, style, table), name) for name in before]
        for number, layer in enumerate(layers):
            prefix = f"blocks.{layer}."
            for name in in_order([name for name in names if name.startswith(prefix)], style):
                local = f"blocks.{number}.{name.removeprefix(prefix)}"
                found.append((foreign_name(local, style, table), name))
        if stage == self.pipeline - 1 and part == self.virtual - 1:
            for name in after:
                foreign = foreign_name(HEAD if name == TIED else name, style, table)
                foreign = _COPY if name == TIED and style == "legacy" else foreign
                found.append((foreign, EMBEDDING if name == TIED else name))
        return found

    def check(self, shape: ModelShape) -> None:
        """Raise a `CheckpointArgumentError` if this layout cannot divide a model."""
        if self.virtual > 1 and self.pipeline == 1:
            raise CheckpointArgumentError(
                "the checkpoint cannot be written in this layout",
                why="a virtual pipeline needs several stages",
                hint="add `--pipeline-model-parallel-size`",
            )
        for what, count, size in (
            ("attention heads", shape.num_attention_heads, self.tensor),
            ("heads of keys and values", shape.num_query_groups, self.tensor),
            ("feed-forward channels", shape.ffn_hidden_size, self.tensor),
            ("layers", shape.num_layers, self.pipeline * self.virtual),
        ):
            if size < 1 or count % size:
                raise CheckpointArgumentError(
                    "the checkpoint cannot be written in this layout",
                    why=f"{count} {what} cannot be divided into {size} equal parts",
                    hint=_possible(shape, stages=what == "layers"),
                )


def _possible(shape: ModelShape, *, stages: bool) -> str:
    """Return a hint with the sizes by which a model can be divided."""
    flag, count = "--pipeline-model-parallel-size", shape.num_layers
    if not stages:
        flag = "--tensor-model-parallel-size"
        count = math.gcd(shape.num_attention_heads, shape.num_query_groups, shape.ffn_hidden_size)
    sizes = [f"{size}" for size in range(1, count + 1) if count % size == 0]
    *first, last = sizes
    listed = f"{', '.join(first)} or {last}" if first else last
    parts = ", multiplied by the number of virtual stages," if stages else ""
    return f"`{flag}`{parts} can be {listed}"


def in_order(names: Sequence[str], style: str) -> list[str]:
    """Return the parameters of layers in the order in which Megatron's layers make them.

    Args:
        names: Names in lmcore of parameters of layers.
        style: Set of names, one of `STYLES`.
    """
    order = _ORDER[style]
    return sorted(names, key=lambda name: (int(name.split(".")[1]), order.index(_module(name))))


def outside_layers(shape: ModelShape, style: str, *, copy: bool) -> tuple[list[str], list[str]]:
    """Return the parameters before and after the layers in the order in which Megatron makes them.

    Args:
        shape: Shape of the model.
        style: Set of names, one of `STYLES`.
        copy: True if the last stage has a copy of the token embedding; it is `TIED`.
    """
    table, names = names_for(shape), list(parameter_shapes(shape))
    assert table is not None
    first = next(place for place, name in enumerate(names) if name.startswith("blocks."))
    after = [name for name in names[first:] if not name.startswith("blocks.")]
    after += [HEAD] if copy else []
    before, after = (_as_listed(part, table, style) for part in (names[:first], after))
    return before, [TIED if copy and name == HEAD else name for name in after]


def _as_listed(names: Sequence[str], table: MegatronNames, style: str) -> list[str]:
    """Return parameters outside the layers in the order of a table of names."""
    places = list(table.legacy if style == "legacy" else table.core)
    return sorted(
        names, key=lambda name: places.index(name if name in places else name.rpartition(".")[0])
    )


def _module(name: str) -> str:
    """Return the module of a layer's parameter, such as `attention.qkv`."""
    inside = name.split(".", 2)[2]
    return inside.removesuffix("_bias") if inside.endswith("_bias") else inside.rpartition(".")[0]
