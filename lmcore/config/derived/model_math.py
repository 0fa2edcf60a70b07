"""Shape of a model from the settings of the `model` section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.config.section.model import ModelSection
from lmcore.model.family import family_of, named_family
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["family_name", "ffn_hidden_size", "head_size", "model_shape", "num_query_groups"]

_GATED_MULTIPLE = 64
_SWIGLU = "swiglu"
"""Value of `--glu-activation` for the model of `--swiglu`."""


def family_name(model: ModelSection) -> str:
    """Return the name of the model's family; empty if the settings name one that there is not."""
    is_known = not model.model_family or named_family(model.model_family) is not None
    return family_of(model).name if is_known else ""


def ffn_hidden_size(model: ModelSection) -> int:
    """Return the width of the feed-forward layer, 4 * hidden_size by default.

    The default with `--swiglu`, which has a third matrix, is two thirds of that, rounded down to a
    multiple of 64; with `--glu-activation` it is not less.
    """
    if model.ffn_hidden_size or not model.swiglu:
        return model.ffn_hidden_size or 4 * model.hidden_size
    return int(4 * model.hidden_size * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE


def head_size(model: ModelSection) -> int:
    """Return the number of channels of an attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def num_query_groups(model: ModelSection) -> int:
    """Return the number of key and value heads; without groups one for each query head."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return model.num_query_groups or 1


def model_shape(
    model: ModelSection,
    padded_vocab_size: int,
    config: Config | None = None,
    *,
    num_labels: int = 0,
) -> ModelShape:
    """Return the shape of the model of some settings.

    Args:
        model: Settings of the model.
        padded_vocab_size: Rows of the embedding.
        config: All settings, for a family that has further ones; None: they have their defaults.
        num_labels: Number of classes, or choices, of the task.

    Raises:
        ConfigError: No family has the name.
    """
    family = family_of(model)
    own = dict(family.settings)
    if config is not None:
        own = {name: config.named(name) for name in own}
    return ModelShape(
        model_family=family.key if family.matches is None else "",
        further=tuple(sorted(own.items())),
        task="" if config is None else config.task.task or "",
        num_labels=num_labels,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=ffn_hidden_size(model),
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        padded_vocab_size=padded_vocab_size,
        layernorm_epsilon=model.layernorm_epsilon,
        init_method_std=model.init_method_std,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        head_dim=model.kv_channels or 0,
        num_query_groups=num_query_groups(model),
        normalization=model.normalization,
        swiglu=model.swiglu or model.glu_activation == _SWIGLU,
        glu_activation="" if model.glu_activation == _SWIGLU else model.glu_activation or "",
        embed_layernorm=model.embed_layernorm,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rope_scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else 1.0,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
    )
