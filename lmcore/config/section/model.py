"""The model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class ModelSection:
    """Shape of the transformer; the names are Megatron's flags."""

    num_layers: int = option(4, "Transformer layers.", minimum=1)
    hidden_size: int = option(128, "Width of the residual stream.", minimum=1)
    num_attention_heads: int = option(
        4, "Attention heads; each has hidden_size / num_attention_heads channels.", minimum=1
    )
    kv_channels: int | None = option(
        None,
        "Channels of an attention head; default: hidden_size / num_attention_heads.",
        minimum=1,
    )
    group_query_attention: bool = option(False, "Have groups of query heads share keys and values.")
    num_query_groups: int | None = option(
        None,
        "Heads of keys and values, with --group-query-attention; default: 1.",
        minimum=1,
    )
    ffn_hidden_size: int | None = option(
        None,
        "Width of the feed-forward layer; default: 4 * hidden_size, with --swiglu two thirds of "
        "it, down to a multiple of 64.",
        minimum=1,
    )
    swiglu: bool = option(False, "Gate the feed-forward layer by SiLU, in place of GELU.")
    normalization: str = option(
        "LayerNorm", "What normalizes before each branch.", choices=("LayerNorm", "RMSNorm")
    )
    seq_length: int = option(128, "Tokens in a training sample.", minimum=1)
    max_position_embeddings: int | None = option(
        None, "Longest sequence that the model is for; default: seq_length.", minimum=1
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "How a token's place is told: by an embedding, by rotating queries and keys, or not.",
        choices=("learned_absolute", "rope", "none"),
    )
    rotary_base: int = option(10000, "Base of the rotation's angles.", above=1)
    rotary_percent: float = option(
        1.0, "Share of a head's channels that are rotated.", above=0, maximum=1
    )
    use_rope_scaling: bool = option(
        False, "Slow the rotation down for a context longer than 8192, as Llama 3.1 does."
    )
    rope_scaling_factor: float = option(
        8.0, "How many times longer, with --use-rope-scaling.", minimum=1
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer weights of its own, in place of the embedding's."
    )
    add_bias_linear: bool = option(True, "Add biases in linear layers.")
    add_qkv_bias: bool = option(
        False, "Add biases to queries, keys and values even where no other layer has them."
    )
    layernorm_epsilon: float = option(1e-5, "Added to the variance in normalization.", above=0)
    init_method_std: float = option(
        0.02,
        "Standard deviation of initial weights; output projections use it / sqrt(2 * layers).",
        above=0,
    )
    attention_dropout: float = option(
        0.0, "Probability that an attention weight is dropped.", minimum=0, below=1
    )
    hidden_dropout: float = option(
        0.0, "Probability that a residual branch's channel is dropped.", minimum=0, below=1
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded up to a multiple of this, times the tensor-parallel size.",
        minimum=1,
    )
