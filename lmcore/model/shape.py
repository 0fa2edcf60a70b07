"""`ModelShape`: sizes of a model, and `ModelPart`: the layers that one rank builds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any

from lmcore.model.vocabulary import vocabulary_multiple

__all__ = ["ModelPart", "ModelShape"]

_LATER = "may be missing"


def _later(default: Any) -> Any:
    """Return a field that checkpoints leave out if it has its default value."""
    return field(default=default, metadata={_LATER: True})


Further = tuple[tuple[str, bool | int | float | str], ...]
"""Names and values, sorted: hashable, unlike a dictionary."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and initialization of a model; names are the options of the `model` section.

    Attributes:
        head_dim: Channels of one attention head; 0: hidden_size / num_attention_heads.
        num_query_groups: Number of heads of keys and values; 0: one for each query head.
        rope_scaling_factor: Ratio of the longest context to the context in training; 1: no scaling.
        model_family: Name of the family in small letters; empty: GPT or Llama, as the settings say.
        vocab_size: Number of tokens, beyond which rows only pad the vocabulary and are left out of
            the loss; 0: every row counts.  It is a setting of the run, and not saved.
        further: Values of the settings that only this family has (`Family.settings`), by name.
        glu_activation: Activation of a gate other than `swiglu`'s: geglu, liglu or reglu; empty:
            no other one.
        embed_layernorm: True to normalize the token embeddings.
        task: Task of the model's head (`--task`); empty: the heads of pretraining.
        num_labels: Number of classes of a classification, or most choices of a question; 0 without
            a task.
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
    model_family: str = _later("")
    task: str = _later("")
    num_labels: int = _later(0)
    further: Further = _later(())  # noqa: RUF009 - a field
    vocab_size: int = 0
    glu_activation: str = _later("")
    embed_layernorm: bool = _later(False)  # noqa: FBT003

    def __post_init__(self) -> None:
        """Replace zeros by the values that follow from other fields."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not self.num_query_groups:
            object.__setattr__(self, "num_query_groups", self.num_attention_heads)

    @property
    def own(self) -> dict[str, Any]:
        """Values of the settings that only this family has, by name."""
        return dict(self.further)

    @property
    def attention_size(self) -> int:
        """Number of channels of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Number of channels of all heads of keys together; the same for values."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def gated(self) -> bool:
        """True if the first projection of a feed-forward layer has a gate."""
        return self.swiglu or bool(self.glu_activation)

    @property
    def learned_positions(self) -> bool:
        """True if positions are encoded by learned embeddings."""
        return self.position_embedding_type == "learned_absolute"

    @property
    def relative_positions(self) -> bool:
        """True if positions are encoded by a bias of attention for each distance."""
        return self.position_embedding_type == "relative"

    @property
    def alibi(self) -> bool:
        """True if positions are encoded by a bias of attention that is linear in the distance."""
        return self.position_embedding_type == "alibi"

    @property
    def rotary(self) -> bool:
        """True if positions are encoded by rotation of queries and keys."""
        return self.position_embedding_type == "rope"

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def tied(self) -> bool:
        """True if token embedding and head share a weight."""
        return not self.untie_embeddings_and_output_weights

    def narrowed(self, size: int) -> ModelShape:
        """Return the shape of the narrow model of one rank of tensor parallelism.

        Heads, feed-forward channels and rows of the embedding are split; the residual stream keeps
        its width.

        Args:
            size: Number of ranks.
        """
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // size,
            num_query_groups=self.num_query_groups // size,
            ffn_hidden_size=self.ffn_hidden_size // size,
            padded_vocab_size=self.padded_vocab_size // size,
        )

    def settings(self, vocab_size: int | None) -> dict[str, Any]:
        """Return the options of the `model` section that give this shape, by name.

        Args:
            vocab_size: Number of tokens, which `make_vocab_size_divisible_by` pads; None if it is
                not known: any number is then padded to the rows.
        """
        names = {
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"),
            *("max_position_embeddings", "layernorm_epsilon", "init_method_std"),
            *("attention_dropout", "hidden_dropout", "normalization", "swiglu"),
            *("position_embedding_type", "untie_embeddings_and_output_weights"),
            *("add_bias_linear",),
        }
        names |= {name for name in ("glu_activation", "embed_layernorm") if getattr(self, name)}
        if not self.add_bias_linear:
            names.add("add_qkv_bias")
        if self.rotary:
            names |= {"rotary_base", "rotary_percent"}
        found = {name: getattr(self, name) for name in names} | self.own
        if self.model_family:
            found["model_family"] = self.model_family
        rows = self.padded_vocab_size
        found["make_vocab_size_divisible_by"] = (
            rows if vocab_size is None else vocabulary_multiple(vocab_size, rows)
        )
        if self.attention_size != self.hidden_size:
            found["kv_channels"] = self.head_dim
        if self.num_query_groups != self.num_attention_heads:
            found |= {"group_query_attention": True, "num_query_groups": self.num_query_groups}
        if self.rotary and self.rope_scaling_factor != 1.0:
            found["use_rope_scaling"] = True
            found["rope_scaling_factor"] = self.rope_scaling_factor
        return dict(sorted(found.items()))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint's manifest, without later fields at their default."""
        values, later = self.values(), self.later()
        sizes = {one.name for one in dataclasses.fields(self) if one.default is dataclasses.MISSING}
        usual = type(self)(**{name: values[name] for name in sizes}).values()
        left_out = {name for name in later if name in usual and values[name] == usual[name]}
        return {name: value for name, value in values.items() if name not in left_out}

    def values(self) -> dict[str, Any]:
        """Return every value by name, also each one of `further`."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del values["further"], values["vocab_size"]
        return values | self.own

    @classmethod
    def saved_types(cls) -> dict[str, str]:
        """Return the type of each value that every family has, by name."""
        types = {one.name: str(one.type) for one in dataclasses.fields(cls)}
        del types["further"], types["vocab_size"]
        return types

    @classmethod
    def later(cls) -> frozenset[str]:
        """Return the names that a manifest may leave out; they then have their defaults."""
        fields = dataclasses.fields(cls)
        return frozenset(one.name for one in fields if one.metadata.get(_LATER))


@dataclass(frozen=True)
class ModelPart:
    """Part of a model that one rank of a pipeline builds.

    Attributes:
        layers: Numbers of the layers.
        embedding: True if the part has the token embedding.
        head: True if the part has final norm, head and loss.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True

    @classmethod
    def whole(cls, shape: ModelShape) -> ModelPart:
        """Return the part that is the whole model."""
        return cls(tuple(range(shape.num_layers)))
