"""Tensors of transformers' models, as recipes for the tensors of lmcore."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from lmcore.conversion.recipe import Recipe, grouped_qkv, same, stacked, transposed
from lmcore.model.architecture import Architecture, architectures
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape

__all__ = ["recipes_of", "token_embedding"]


def token_embedding(kind: Architecture, shape: ModelShape) -> str:
    """Return the name of the token embedding's weight.

    Args:
        kind: Architecture of transformers.
        shape: Shape of the model.
    """
    return kind.tensors("token_embedding.weight", shape).names[0]


def recipes_of(model_type: str, shape: ModelShape, *, zeros: str = "") -> dict[str, Recipe]:
    """Return the recipe of each parameter of lmcore, by its name.

    Args:
        model_type: Architecture of transformers.
        shape: Shape of the model.
        zeros: Pattern of the names of parameters that the other model lacks; see `ConfigReader`.
    """
    kind, lacking = architectures()[model_type], re.compile(zeros or "(?!)")
    return {
        name: _zeros(size) if lacking.fullmatch(name) else _recipe(kind, name, size, shape)
        for name, size in parameter_shapes(shape).items()
    }


def _recipe(kind: Architecture, name: str, size: tuple[int, ...], shape: ModelShape) -> Recipe:
    found = kind.tensors(name, shape)
    if found.rows:
        return stacked(found.names, found.rows, size)
    if found.by_head:
        groups, heads = shape.num_query_groups, shape.num_attention_heads
        return grouped_qkv(
            *(found.names[0], size),
            groups=groups,
            queries=heads // groups,
            channels=shape.head_dim,
        )
    return (transposed if found.transposed else same)(found.names[0], size)


def _zeros(size: tuple[int, ...]) -> Recipe:
    """Return the recipe of a tensor of zeros, which the other format lacks."""

    def none(_tensor: Tensor) -> Sequence[Tensor]:
        raise AssertionError("this recipe reads only")

    return Recipe({}, lambda _parts: torch.zeros(size), none)
