"""`ModelShape`: the numbers a model is built from, and `ModelPart`: which of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.config.resolve import RunPlan

__all__ = ["ModelPart", "ModelShape"]


@dataclass(frozen=True)
class ModelShape:
    """Shape and initialisation of a GPT; the words are those of the `model` section.

    Attributes:
        head_dim: Channels of one attention head; 0: hidden_size / num_attention_heads.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    padded_vocab_size: int
    layernorm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    head_dim: int = field(default=0, metadata={"saved": False})

    def __post_init__(self) -> None:
        """Fill in what follows from the rest."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def attention_size(self) -> int:
        """Channels of all attention heads together."""
        return self.num_attention_heads * self.head_dim

    def narrowed(self, size: int) -> ModelShape:
        """Return the shape of one of *size* equal parts of every layer and of the vocabulary.

        The residual stream keeps its width; heads, feed-forward channels and rows of the
        embedding are divided.
        """
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // size,
            ffn_hidden_size=self.ffn_hidden_size // size,
            padded_vocab_size=self.padded_vocab_size // size,
        )

    @classmethod
    def from_plan(cls, plan: RunPlan) -> ModelShape:
        """Return the shape that a resolved plan asks for."""
        model = plan.config.model
        assert model.ffn_hidden_size is not None
        assert model.max_position_embeddings is not None
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            ffn_hidden_size=model.ffn_hidden_size,
            max_position_embeddings=model.max_position_embeddings,
            padded_vocab_size=plan.padded_vocab_size,
            layernorm_epsilon=model.layernorm_epsilon,
            init_method_std=model.init_method_std,
            attention_dropout=model.attention_dropout,
            hidden_dropout=model.hidden_dropout,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint's manifest."""
        return {name: getattr(self, name) for name in self.saved_types()}

    @classmethod
    def saved_types(cls) -> dict[str, str]:
        """Return the type of each value that `to_dict` has, by its name."""
        fields = dataclasses.fields(cls)
        return {one.name: str(one.type) for one in fields if one.metadata.get("saved", True)}


@dataclass(frozen=True)
class ModelPart:
    """Which part of a model to build.

    Attributes:
        layers: Numbers of the layers.
        embedding: Whether it turns tokens into hidden states.
        head: Whether it has the final norm and the loss; the embedding's weights are then there.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True

    @classmethod
    def whole(cls, shape: ModelShape) -> ModelPart:
        """Return all of the model."""
        return cls(tuple(range(shape.num_layers)))
