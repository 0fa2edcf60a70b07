"""Registry of model families: the class that builds the models of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.model.gpt import GPT
from lmcore.model.recompute import KEEP_ALL, Recompute

if TYPE_CHECKING:
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.protocol import Model
    from lmcore.model.shape import ModelPart, ModelShape

__all__ = ["MODEL_CLASSES", "create_model"]

MODEL_CLASSES: dict[str, type[Model]] = {"GPT": GPT, "Llama": GPT}
"""Class of each family, by `ModelShape.family`."""


def create_model(
    shape: ModelShape,
    ops: OpBinding,
    recompute: Recompute = KEEP_ALL,
    *,
    masked: bool = False,
    part: ModelPart | None = None,
) -> Model:
    """Return an uninitialized model of the family of *shape*; see `Model` for the arguments."""
    return MODEL_CLASSES[shape.family](shape, ops, recompute, masked=masked, part=part)
