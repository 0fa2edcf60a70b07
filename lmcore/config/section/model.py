"""Section `model`: the shape of the transformer."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need, setting
from lmcore.config.option import CHECKED, FREE, option

_ROPE = setting("--position-embedding-type", "rope").else_error(
    "other positional encodings do not rotate queries and keys"
)
_ROPE_SCALING = setting("--use-rope-scaling").else_error(
    "without it `--rotary-base` alone sets the frequencies"
)
_GROUPS = setting("--group-query-attention").else_error(
    "without it each query head has its own key and value head"
)
_FEW_BIASES = Need("`--no-add-bias-linear`", lambda run: not run.config.model.add_bias_linear)


@dataclass(frozen=True)
class ModelSection:
    """Shape of the transformer; the names are Megatron's flags."""

    model_family: str | None = option(
        None,
        "Family of the model: bert, gpt, ict, llama, retro, t5 or one that a plugin adds; gpt and "
        "llama are decoders, which their other settings tell apart; default: a decoder.",
        on_resume=CHECKED,
        metavar="NAME",
    )
    num_layers: int = option(4, "Number of transformer layers.", minimum=1, on_resume=CHECKED)
    hidden_size: int = option(128, "Width of the residual stream.", minimum=1, on_resume=CHECKED)
    num_attention_heads: int = option(
        4, "Number of attention heads (query heads).", minimum=1, on_resume=CHECKED
    )
    kv_channels: int | None = option(
        None,
        "Channels of an attention head; default: hidden_size / num_attention_heads.",
        minimum=1,
        on_resume=CHECKED,
    )
    group_query_attention: bool = option(
        False, "Share each key and value head among a group of query heads.", on_resume=CHECKED
    )
    num_query_groups: int | None = option(
        None,
        "Number of key and value heads, with --group-query-attention; default: 1.",
        minimum=1,
        on_resume=CHECKED,
        needs=_GROUPS,
    )
    ffn_hidden_size: int | None = option(
        None,
        "Width of the feed-forward layer; default: 4 * hidden_size; with --swiglu 8/3 * "
        "hidden_size, rounded down to a multiple of 64.",
        minimum=1,
        on_resume=CHECKED,
    )
    swiglu: bool = option(
        False, "Use SwiGLU in the feed-forward layer instead of GELU.", on_resume=CHECKED
    )
    glu_activation: str | None = option(
        None,
        "Gate of the feed-forward layer by its activation, in place of GELU: exact GELU (geglu), "
        "none (liglu), ReLU (reglu) or SiLU (swiglu, as --swiglu but with 4 * hidden_size).",
        choices=("geglu", "liglu", "reglu", "swiglu"),
        on_resume=CHECKED,
    )
    normalization: str = option(
        "LayerNorm",
        "Normalization before attention and feed-forward layer.",
        choices=("LayerNorm", "RMSNorm"),
        on_resume=CHECKED,
    )
    seq_length: int = option(128, "Tokens in a training sample.", minimum=1, on_resume=CHECKED)
    max_position_embeddings: int | None = option(
        None,
        "Longest sequence of the model, in tokens; default: seq_length.",
        minimum=1,
        on_resume=CHECKED,
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "Positional encoding: learned embeddings, rotary embeddings (rope), a bias of attention "
        "that grows with the distance (alibi) or is learned for each distance (relative, of T5), "
        "or none.",
        choices=("learned_absolute", "rope", "alibi", "relative", "none"),
        refused={
            **dict.fromkeys(
                ("mrope", "yarn"),
                "use `--position-embedding-type rope`, which gives another model",
            ),
        },
        aliases={"absolute": "learned_absolute", "rotary": "rope"},
        on_resume=CHECKED,
    )
    rotary_base: int = option(
        10000, "Base (theta) of the rotary frequencies.", above=1, on_resume=CHECKED, needs=_ROPE
    )
    rotary_percent: float = option(
        1.0,
        "Fraction of a head's channels that rotary embeddings rotate.",
        above=0,
        maximum=1,
        on_resume=CHECKED,
        needs=_ROPE,
    )
    use_rope_scaling: bool = option(
        False,
        "Scale the rotary frequencies as Llama 3.1 does, for contexts beyond 8192 tokens.",
        on_resume=CHECKED,
        needs=_ROPE,
    )
    rope_scaling_factor: float = option(
        8.0,
        "Factor by which --use-rope-scaling extends the context.",
        minimum=1,
        on_resume=CHECKED,
        needs=_ROPE_SCALING,
    )
    embed_layernorm: bool = option(
        False, "Normalize the token embeddings, with gain and offset.", on_resume=CHECKED
    )
    untie_embeddings_and_output_weights: bool = option(
        False,
        "Give the output layer its own weights instead of the token embedding's.",
        on_resume=CHECKED,
    )
    add_bias_linear: bool = option(True, "Use biases in linear layers.", on_resume=CHECKED)
    add_qkv_bias: bool = option(
        False,
        "Use biases for queries, keys and values even with --no-add-bias-linear.",
        on_resume=CHECKED,
        needs=_FEW_BIASES,
    )
    layernorm_epsilon: float = option(
        1e-5,
        "Epsilon added to the variance (mean square) in normalization.",
        above=0,
        on_resume=CHECKED,
    )
    init_method_std: float = option(
        0.02,
        "Standard deviation of initial weights; for output projections divided by "
        "sqrt(2 * num_layers).",
        above=0,
        on_resume=FREE,
    )
    attention_dropout: float = option(
        0.0, "Dropout probability of attention weights.", minimum=0, below=1
    )
    hidden_dropout: float = option(
        0.0,
        "Dropout probability of the outputs of attention and feed-forward layers.",
        minimum=0,
        below=1,
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        minimum=1,
        on_resume=FREE,
    )
    pad_vocab_size_to: int | None = option(
        None,
        "Pad the vocabulary to exactly this many rows; make_vocab_size_divisible_by then has no "
        "effect.",
        minimum=1,
        on_resume=FREE,
    )
