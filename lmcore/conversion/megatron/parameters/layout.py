"""Parallel layouts of Megatron: which rank has which parameters, in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.base.errors import CheckpointArgumentError
from lmcore.conversion.megatron.parameters.names import (
    EMBEDDING,
    HEAD,
    TIED,
    foreign_name,
    stack_of,
)
from lmcore.model.family import parameter_shapes
from lmcore.model.megatron_names import MegatronNames, names_for
from lmcore.model.shape import ModelShape

__all__ = ["Layout", "in_layers", "outside_layers"]

_COPY = "word_embeddings_for_head.weight"
"""Name of the copy of a tied token embedding before megatron-core."""
_ORDER = {
    "core": (
        "attention.output",
        "attention_norm",
        "attention.qkv",
        "cross_attention_norm",
        "cross_attention.output",
        "cross_attention.query",
        "cross_attention.key_value",
        "feed_forward_norm",
        "feed_forward.up",
        "feed_forward.down",
    ),
    "core-local": (
        "attention_norm",
        "attention.output",
        "attention.qkv",
        "cross_attention_norm",
        "cross_attention.output",
        "cross_attention.query",
        "cross_attention.key_value",
        "feed_forward_norm",
        "feed_forward.up",
        "feed_forward.down",
    ),
    "legacy": (
        "attention_norm",
        "attention.qkv",
        "attention.output",
        "cross_attention_norm",
        "cross_attention.query",
        "cross_attention.key_value",
        "cross_attention.output",
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
        table = names_for(shape)
        assert table is not None
        before, after = outside_layers(shape, style, copy=shape.tied and self.pipeline > 1)
        first = stage == part == 0
        last = stage == self.pipeline - 1 and part == self.virtual - 1
        stacks = in_layers(shape, style)
        found: list[tuple[str, str]] = []
        for place, name in enumerate([*before, *after]):
            owner = name.rpartition(".")[0]
            for key in [key for key in stacks if table.stacks[key].norm == owner]:
                found += self._of_stack(table, key, *stacks.pop(key), stage, part, style)
            if not (first if place < len(before) else last):
                continue
            foreign = foreign_name(HEAD if name == TIED else name, style, table)
            foreign = _COPY if name == TIED and style == "legacy" else foreign
            found.append((foreign, EMBEDDING if name == TIED else name))
        return found

    def _of_stack(
        self,
        table: MegatronNames,
        key: str,
        count: int,
        names: Sequence[str],
        stage: int,
        part: int,
        style: str,
    ) -> list[tuple[str, str]]:
        """Return the parameters of the layers of a stack that one part has; see `parameters`."""
        found = []
        layers = self.layers(count, stage, part)
        for name in names:
            layer, _, inside = name.removeprefix(f"{key}.").partition(".")
            if int(layer) in layers:
                local = f"{key}.{int(layer) - layers.start}.{inside}"
                found.append((foreign_name(local, style, table), name))
        return found

    def check(self, shape: ModelShape) -> None:
        """Raise a `CheckpointArgumentError` if this layout cannot divide a model."""
        if self.virtual > 1 and self.pipeline == 1:
            raise CheckpointArgumentError(
                "the checkpoint cannot be written in this layout",
                why="a virtual pipeline needs several stages",
                hint="add `--pipeline-model-parallel-size`",
            )
        names = names_for(shape)
        if names is not None and len(names.stacks) > 1 and self.pipeline > 1:
            raise CheckpointArgumentError(
                "the checkpoint cannot be written in this layout",
                why="a model with several stacks of layers is written for one stage",
                hint="leave `--pipeline-model-parallel-size` out",
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


def in_layers(shape: ModelShape, style: str) -> dict[str, tuple[int, list[str]]]:
    """Return the number of layers and the parameters of each stack, as Megatron makes them.

    Args:
        shape: Shape of the model.
        style: Set of names, one of `STYLES`.
    """
    table, order = names_for(shape), _ORDER[style]
    assert table is not None
    found: dict[str, list[tuple[int, int, str]]] = {stack: [] for stack in table.stacks}
    for name in parameter_shapes(shape):
        if (place := stack_of(name, table)) is not None:
            stack, layer, inside = place
            found[stack].append((layer, order.index(_module(inside)), name))
    return {
        stack: (1 + max(held)[0], [name for _, _, name in sorted(held, key=lambda one: one[:2])])
        for stack, held in found.items()
        if held
    }


def outside_layers(shape: ModelShape, style: str, *, copy: bool) -> tuple[list[str], list[str]]:
    """Return the parameters before and after the layers in the order in which Megatron makes them.

    Args:
        shape: Shape of the model.
        style: Set of names, one of `STYLES`.
        copy: True if the last stage has a copy of the token embedding; it is `TIED`.
    """
    table, names = names_for(shape), list(parameter_shapes(shape))
    assert table is not None
    outside = [name for name in names if stack_of(name, table) is None]
    outside = _as_listed([*outside, *([HEAD] if copy else [])], table, style)
    norms = {stack.norm for stack in table.stacks.values()}
    first = next(place for place, name in enumerate(outside) if name.rpartition(".")[0] in norms)
    after = [TIED if copy and name == HEAD else name for name in outside[first:]]
    return outside[:first], after


def _as_listed(names: Sequence[str], table: MegatronNames, style: str) -> list[str]:
    """Return parameters outside the layers in the order of a table of names."""
    places = list(table.legacy if style == "legacy" else table.core)
    return sorted(
        names, key=lambda name: places.index(name if name in places else name.rpartition(".")[0])
    )


def _module(name: str) -> str:
    """Return the module of a parameter by its name in the layer, such as `attention.qkv`."""
    return name.removesuffix("_bias") if name.endswith("_bias") else name.rpartition(".")[0]
