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
    ffn_hidden_size: int | None = option(
        None, "Width of the feed-forward layer; default: 4 * hidden_size.", minimum=1
    )
    seq_length: int = option(128, "Tokens in a training sample.", minimum=1)
    max_position_embeddings: int | None = option(
        None, "Longest sequence with a learned position; default: seq_length.", minimum=1
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
