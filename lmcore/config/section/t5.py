"""Section `t5`: what T5 models and their samples have beside what all models have."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need
from lmcore.config.option import CHECKED, option

_T5 = Need("`--model-family t5`", lambda run: run.family in {"T5", ""})
_RELATIVE = Need(
    "`--model-family t5 --position-embedding-type relative`",
    lambda run: (
        run.family == ""
        or (run.family == "T5" and run.config.model.position_embedding_type == "relative")
    ),
)


@dataclass(frozen=True)
class T5Section:
    """T5 models and their samples; the names are Megatron's flags where it has them.

    `num_layers` and `seq_length` are the encoder's.
    """

    decoder_num_layers: int = option(
        0,
        "Number of layers of the decoder; 0: as many as the encoder, num_layers.",
        minimum=0,
        maximum=10_000,
        on_resume=CHECKED,
        needs=_T5,
    )
    decoder_seq_length: int | None = option(
        None,
        "Tokens in the decoder's part of a training sample; default: 128, or seq_length if that "
        "is less.",
        minimum=1,
        needs=_T5.else_error("no other family has a decoder beside its encoder"),
    )
    relative_attention_num_buckets: int = option(
        32,
        "Number of groups of distances, each of which has a bias for each head.",
        minimum=4,
        maximum=4096,
        on_resume=CHECKED,
        needs=_RELATIVE,
    )
    relative_attention_max_distance: int = option(
        128,
        "Distance in tokens from which all distances are one group.",
        minimum=2,
        on_resume=CHECKED,
        needs=_RELATIVE,
    )
    t5_feed_forward: str = option(
        "gelu",
        "Activation of the feed-forward layer: GELU by tanh, as Megatron; ReLU, as the original "
        "T5; or a gate of GELU or SiLU with a third matrix, as T5 1.1, Flan-T5 and mT5.",
        choices=("gelu", "relu", "gated-gelu", "gated-silu"),
        on_resume=CHECKED,
        needs=_T5,
    )
    t5_scaled_attention: bool = option(
        True,
        "Divide the products of queries and keys by the root of a head's channels, as Megatron; "
        "the original T5 does not.",
        on_resume=CHECKED,
        needs=_T5,
    )
    t5_scaled_head: bool = option(
        False,
        "Divide the hidden states before the head by the root of hidden_size, as the original T5.",
        on_resume=CHECKED,
        needs=_T5,
    )
    t5_head_bias: bool = option(
        True,
        "Add a bias for each token of the vocabulary in the head, as Megatron; the original T5 "
        "has none.",
        on_resume=CHECKED,
        needs=_T5,
    )
