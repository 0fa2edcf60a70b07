"""BLOOM of transformers: ALiBi, normalized embeddings, queries, keys and values by head.

Torch-free.  Values come from transformers' `BloomConfig`.
"""

from __future__ import annotations

from typing import Any

from lmcore.base.errors import counted
from lmcore.families.layers.parameters import module_of
from lmcore.model.architecture import ConfigReader, ForeignTensors
from lmcore.model.shape import ModelShape

__all__ = ["EMBEDDING", "differences", "read", "tensors", "write"]

EMBEDDING = "transformer.word_embeddings.weight"
_LENGTH = 2048
"""Length of the training samples of BLOOM's models, if a file does not record it."""
_NAMES = {
    "token_embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "final_norm": "transformer.ln_f",
    "output_embedding": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}


def tensors(name: str, _shape: ModelShape) -> ForeignTensors:
    """Return the tensors of a parameter; see `Architecture`."""
    layer, module, parameter = module_of(name)
    prefix = f"transformer.h.{layer}." if layer else ""
    names = (f"{prefix}{_NAMES[module]}.{parameter}",)
    return ForeignTensors(names, by_head=module == "attention.qkv")


def read(reader: ConfigReader) -> dict[str, Any]:
    """Return the values of the shape; see `Architecture`."""
    reader.require("apply_residual_connection_post_layernorm", [False])
    hidden = reader.get("n_embed", reader.get("hidden_size", 64))
    if not isinstance(hidden, int):
        raise reader.unsupported(f"`hidden_size` is `{hidden}`, not an integer")
    return {
        "num_layers": reader.get("n_layer", reader.get("num_hidden_layers", 2)),
        "hidden_size": hidden,
        "num_attention_heads": reader.get("n_head", reader.get("num_attention_heads", 8)),
        "ffn_hidden_size": 4 * hidden,
        "max_position_embeddings": reader.get("seq_length", _LENGTH),
        "padded_vocab_size": reader.get("vocab_size", 250880),
        "layernorm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "init_method_std": reader.get("initializer_range", 0.02),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", True),
        "attention_dropout": reader.get("attention_dropout", 0.0),
        "hidden_dropout": reader.get("hidden_dropout", 0.0),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    """Return the values of `config.json`; see `Architecture`."""
    return {
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": shape.attention_dropout,
        "hidden_dropout": shape.hidden_dropout,
        "hidden_size": shape.hidden_size,
        "layer_norm_epsilon": shape.layernorm_epsilon,
        "n_head": shape.num_attention_heads,
        "n_layer": shape.num_layers,
        "seq_length": shape.max_position_embeddings,
    }


def differences(shape: ModelShape) -> list[str]:
    """Return the features of a model that BLOOM lacks; see `Architecture`."""
    keys, width = counted(shape.num_query_groups, "key head"), 4 * shape.hidden_size
    found = {
        "no ALiBi": not shape.alibi,
        "embeddings that are not normalized": not shape.embed_layernorm,
        f"{shape.normalization} instead of LayerNorm": shape.normalization != "LayerNorm",
        "a gate in its feed-forward layers": shape.gated,
        f"feed-forward layers of {shape.ffn_hidden_size} channels instead of {width}": (
            shape.ffn_hidden_size != width
        ),
        "no biases": not shape.add_bias_linear,
        f"{keys} for {shape.num_attention_heads} query heads": (
            shape.num_query_groups != shape.num_attention_heads
        ),
        f"{shape.attention_size} channels in all heads instead of {shape.hidden_size}": (
            shape.attention_size != shape.hidden_size
        ),
    }
    return [what for what, there in found.items() if there]
