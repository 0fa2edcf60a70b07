"""Architectures of transformers for T5: T5 and T5 1.1 with Flan-T5 (`t5`), and mT5 (`mt5`).

Torch-free.  Values come from `T5Config`; values that a file leaves out have its defaults.
"""

from __future__ import annotations

import re
from typing import Any

from lmcore.base.errors import counted
from lmcore.families.t5.family import decoder_layers, gated
from lmcore.model.architecture import Architecture, ConfigReader, ForeignTensors
from lmcore.model.shape import ModelShape

__all__ = ["ARCHITECTURES"]

_FEED_FORWARD = {
    "relu": "relu",
    "gated-gelu": "gated-gelu",
    "gated-gelu_new": "gated-gelu",
    "gated-silu": "gated-silu",
    "gelu_new": "gelu",
}
"""`t5_feed_forward` by `feed_forward_proj`."""
_WRITTEN = {"gelu": "gelu_new"}
_MODULES = {
    "token_embedding": "shared",
    "encoder_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder_norm": "encoder.final_layer_norm",
    "decoder_norm": "decoder.final_layer_norm",
    "output_embedding": "lm_head",
}
_SELF = {
    "attention.qkv": tuple(f"layer.0.SelfAttention.{one}" for one in "qkv"),
    "attention.output": ("layer.0.SelfAttention.o",),
    "attention_norm": ("layer.0.layer_norm",),
}
_CROSS = {
    "cross_attention.query": ("layer.1.EncDecAttention.q",),
    "cross_attention.key_value": tuple(f"layer.1.EncDecAttention.{one}" for one in "kv"),
    "cross_attention.output": ("layer.1.EncDecAttention.o",),
    "cross_attention_norm": ("layer.1.layer_norm",),
}


def _feed_forward(number: int, shape: ModelShape) -> dict[str, tuple[str, ...]]:
    prefix = f"layer.{number}.DenseReluDense"
    up = ("wi_0", "wi_1") if gated(shape) else ("wi",)
    return {
        "feed_forward.up": tuple(f"{prefix}.{one}" for one in up),
        "feed_forward.down": (f"{prefix}.wo",),
        "feed_forward_norm": (f"layer.{number}.layer_norm",),
    }


def _tensors(name: str, shape: ModelShape) -> ForeignTensors:
    module, _, parameter = name.rpartition(".")
    if module in _MODULES:
        return ForeignTensors((f"{_MODULES[module]}.{parameter}",))
    stack, layer, module = module.split(".", 2)
    inside = _SELF | _feed_forward(1, shape)
    if stack == "decoder":
        inside = _SELF | _CROSS | _feed_forward(2, shape)
    names = tuple(f"{stack}.block.{layer}.{other}.{parameter}" for other in inside[module])
    keys, width = shape.key_size, shape.ffn_hidden_size
    rows = {
        "attention.qkv": (shape.attention_size, keys, keys),
        "cross_attention.key_value": (keys, keys),
        "feed_forward.up": (width, width) if gated(shape) else (),
    }
    return ForeignTensors(names, rows.get(module, ()))


def _read(reader: ConfigReader) -> dict[str, Any]:
    feed_forward = reader.require("feed_forward_proj", tuple(_FEED_FORWARD))
    reader.require("is_decoder", [False])
    tied = reader.get("tie_word_embeddings", True) is not False
    layers = reader.get("num_layers", 6)
    decoder = reader.get("num_decoder_layers", layers)
    return {
        "model_family": "t5",
        "num_layers": layers,
        "hidden_size": reader.get("d_model", 512),
        "num_attention_heads": reader.get("num_heads", 8),
        "head_dim": reader.get("d_kv", 64),
        "ffn_hidden_size": reader.get("d_ff", 2048),
        "max_position_embeddings": reader.get("n_positions", 512),
        "padded_vocab_size": reader.get("vocab_size", 32128),
        "layernorm_epsilon": reader.get("layer_norm_epsilon", 1e-6),
        "init_method_std": reader.get("initializer_range", 0.02),
        "attention_dropout": reader.get("dropout_rate", 0.1),
        "hidden_dropout": reader.get("dropout_rate", 0.1),
        "normalization": "RMSNorm",
        "position_embedding_type": "relative",
        "untie_embeddings_and_output_weights": not tied,
        "add_bias_linear": False,
        "decoder_num_layers": 0 if decoder == layers else decoder,
        "relative_attention_num_buckets": reader.get("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": reader.get("relative_attention_max_distance", 128),
        "t5_feed_forward": _FEED_FORWARD[feed_forward],
        "t5_scaled_attention": False,
        # transformers 5 writes that the weights of every T5 are tied.
        "t5_scaled_head": reader.get("scale_decoder_outputs", tied),
        "t5_head_bias": False,
    }


def _read_mt5(reader: ConfigReader) -> dict[str, Any]:
    """Return the values of an mT5, which never divides the states before its head."""
    return _read(reader) | {"t5_scaled_head": False}


def _differences(shape: ModelShape) -> list[str]:
    own = shape.own
    keys = counted(shape.num_query_groups, "key head")
    found = {
        "learned positions instead of relative ones": not shape.relative_positions,
        f"{shape.normalization} instead of RMSNorm": shape.normalization != "RMSNorm",
        "biases": shape.add_bias_linear or shape.add_qkv_bias,
        "a bias in its head": own["t5_head_bias"],
        "attention divided by the root of a head's channels": own["t5_scaled_attention"],
        "its own weights in the head, but divides the states before it": (
            own["t5_scaled_head"] and not shape.tied
        ),
        "the token embedding's weights in its head, but does not divide the states before it": (
            shape.tied and not own["t5_scaled_head"]
        ),
        f"{keys} for {shape.num_attention_heads} query heads": (
            shape.num_query_groups != shape.num_attention_heads
        ),
    }
    return [what for what, there in found.items() if there]


def _write(shape: ModelShape) -> dict[str, Any]:
    own = shape.own
    feed_forward = own["t5_feed_forward"]
    return {
        "d_ff": shape.ffn_hidden_size,
        "d_kv": shape.head_dim,
        "d_model": shape.hidden_size,
        "dropout_rate": max(shape.hidden_dropout, shape.attention_dropout),
        "feed_forward_proj": _WRITTEN.get(feed_forward, feed_forward),
        "is_encoder_decoder": True,
        "layer_norm_epsilon": shape.layernorm_epsilon,
        "n_positions": shape.max_position_embeddings,
        "num_decoder_layers": decoder_layers(shape),
        "num_heads": shape.num_attention_heads,
        "num_layers": shape.num_layers,
        "relative_attention_max_distance": own["relative_attention_max_distance"],
        "relative_attention_num_buckets": own["relative_attention_num_buckets"],
        "scale_decoder_outputs": own["t5_scaled_head"],
        "use_cache": True,
    }


_COMMON: dict[str, Any] = {
    "tensors": _tensors,
    "write": _write,
    "purpose": "an encoder and a decoder with the head that predicts tokens",
    "head": "lm_head.weight",
    "copies": {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    "buffers": re.compile("(?!)"),
    # The first T5's files have it, and no program used it.
    "ignored": re.compile(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    ),
    "generates": False,
    "begins_decoder": True,
    "hint": "train with `--position-embedding-type relative --normalization RMSNorm "
    "--no-add-bias-linear --no-t5-head-bias --no-t5-scaled-attention --t5-scaled-head` to share "
    "the model there, with `--untie-embeddings-and-output-weights` in place of the last for T5 1.1",
}

ARCHITECTURES = (
    Architecture(
        "t5",
        read=_read,
        differences=_differences,
        class_name=lambda _shape: "T5ForConditionalGeneration",
        other_classes=re.compile(r"(?!T5(?:ForConditionalGeneration|WithLMHeadModel)$).*"),
        **_COMMON,
    ),
    Architecture(
        "mt5",
        read=_read_mt5,
        class_name=lambda _shape: "MT5ForConditionalGeneration",
        other_classes=re.compile(r"(?!MT5ForConditionalGeneration$).*"),
        **_COMMON,
    ),
)
