"""`ModelShape`: what a model is built from, and `ModelPart`: which of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lmcore.config.model_math import query_groups

if TYPE_CHECKING:
    from lmcore.config.resolve import RunPlan

__all__ = ["ModelPart", "ModelShape"]

_LATER = "may be missing"
_NUMBERS = 6
"""Fields without a default."""


def _later(default: Any) -> Any:
    """Return a field of which a checkpoint says nothing where it has its default."""
    return field(default=default, metadata={_LATER: True})


@dataclass(frozen=True)
class ModelShape:
    """Shape and initialisation of a model; the words are those of the `model` section.

    Attributes:
        head_dim: Channels of one attention head; 0: hidden_size / num_attention_heads.
        num_query_groups: Heads of keys and values; 0: one for each query head.
        rope_scaling_factor: How many times longer than in training contexts may be; 1: no longer.
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
    head_dim: int = _later(0)
    num_query_groups: int = _later(0)
    normalization: str = _later("LayerNorm")
    swiglu: bool = _later(False)  # noqa: FBT003 - a default
    position_embedding_type: str = _later("learned_absolute")
    rotary_base: int = _later(10000)
    rotary_percent: float = _later(1.0)
    rope_scaling_factor: float = _later(1.0)
    untie_embeddings_and_output_weights: bool = _later(False)  # noqa: FBT003
    add_bias_linear: bool = _later(True)  # noqa: FBT003
    add_qkv_bias: bool = _later(False)  # noqa: FBT003

    def __post_init__(self) -> None:
        """Fill in what follows from the rest."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not self.num_query_groups:
            object.__setattr__(self, "num_query_groups", self.num_attention_heads)

    @property
    def attention_size(self) -> int:
        """Channels of all attention heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of all heads of keys together, which are those of values too."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def learned_positions(self) -> bool:
        """Whether every place has an embedding of its own."""
        return self.position_embedding_type == "learned_absolute"

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned by their place."""
        return self.position_embedding_type == "rope"

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are turned."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def tied(self) -> bool:
        """Whether the embedding's weights are those of the head, too."""
        return not self.untie_embeddings_and_output_weights

    def narrowed(self, size: int) -> ModelShape:
        """Return the shape of one of *size* equal parts of every layer and of the vocabulary.

        The residual stream keeps its width; heads, feed-forward channels and rows of the
        embedding are divided.
        """
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // size,
            num_query_groups=self.num_query_groups // size,
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
            head_dim=model.kv_channels or 0,
            num_query_groups=query_groups(model),
            normalization=model.normalization,
            swiglu=model.swiglu,
            position_embedding_type=model.position_embedding_type,
            rotary_base=model.rotary_base,
            rotary_percent=model.rotary_percent,
            rope_scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else 1.0,
            untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
            add_bias_linear=model.add_bias_linear,
            add_qkv_bias=model.add_qkv_bias,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint's manifest: of a GPT-2 what it always had."""
        values = {name: getattr(self, name) for name in self.saved_types()}
        usual = type(self)(*(values[one.name] for one in dataclasses.fields(self)[:_NUMBERS]))
        left_out = {name for name in self.later() if values[name] == getattr(usual, name)}
        return {name: value for name, value in values.items() if name not in left_out}

    @classmethod
    def saved_types(cls) -> dict[str, str]:
        """Return the type of each value that `to_dict` may have, by its name."""
        return {one.name: str(one.type) for one in dataclasses.fields(cls)}

    @classmethod
    def later(cls) -> frozenset[str]:
        """Return the names that may be missing in a manifest, and have their defaults then."""
        fields = dataclasses.fields(cls)
        return frozenset(one.name for one in fields if one.metadata.get(_LATER))


@dataclass(frozen=True)
class ModelPart:
    """Which part of a model to build.

    Attributes:
        layers: Numbers of the layers.
        embedding: Whether it turns tokens into hidden states.
        head: Whether it has the final norm and the loss; the head's weights are then there.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True

    @classmethod
    def whole(cls, shape: ModelShape) -> ModelPart:
        """Return all of the model."""
        return cls(tuple(range(shape.num_layers)))
