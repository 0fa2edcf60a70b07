"""Model families: how the settings choose one, and what is counted without building a model.

Torch-free.  The class of each family is in `lmcore.model.registry`, by the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lmcore.config.derived.model_math import flops_per_step, parameter_count
from lmcore.config.section.model import ModelSection

__all__ = ["FAMILIES", "FamilySettings", "ModelFamily", "family_of"]


class FamilySettings(Protocol):
    """Settings that choose a family: of the `model` section, or of a model's shape."""

    @property
    def normalization(self) -> str:
        """Name of the normalization."""

    @property
    def swiglu(self) -> bool:
        """True if the feed-forward layer is SwiGLU."""

    @property
    def position_embedding_type(self) -> str:
        """Positional encoding."""


@dataclass(frozen=True)
class ModelFamily:
    """Model family.

    Attributes:
        name: Name of the family, for messages and for the registry of classes.
        matches: True if the settings choose this family.
        parameter_count: Number of parameters, from the settings and the rows of the embedding.
        flops_per_step: Model FLOPs of a step, from the settings, the rows of the embedding and the
            global batch size; see `lmcore.config.derived.model_math.flops_per_step`.
    """

    name: str
    matches: Callable[[FamilySettings], bool]
    parameter_count: Callable[[ModelSection, int], int] = parameter_count
    flops_per_step: Callable[[ModelSection, int, int], int] = flops_per_step


def _is_llama(settings: FamilySettings) -> bool:
    rotary = settings.position_embedding_type == "rope"
    return settings.normalization == "RMSNorm" and settings.swiglu and rotary


FAMILIES = {
    "Llama": ModelFamily("Llama", _is_llama),
    "GPT": ModelFamily("GPT", lambda _settings: True),
}
"""Every family by name, in the order in which they are tried: GPT is any other model."""


def family_of(settings: FamilySettings) -> ModelFamily:
    """Return the family that the settings choose."""
    return next(family for family in FAMILIES.values() if family.matches(settings))
