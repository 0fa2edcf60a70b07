"""Names and arguments of T5 in Megatron's checkpoints.  Torch-free.

Megatron's T5 has learned positions, or since megatron-core the original's biases of distances; it
divides the scores of attention, and has one size for both stacks.  Its layers' GELU is the tanh
approximation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lmcore.families.t5.family import decoder_layers, gated
from lmcore.model.megatron_names import MegatronNames, Stack
from lmcore.model.shape import ModelShape

__all__ = ["NAMES"]

_CROSSED = (".cross_attention.", ".inter_attention.")


def _matches(names: Collection[str]) -> bool:
    return any(part in name for name in names for part in _CROSSED)


def _values(args: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    encoder = args.get("encoder_num_layers") or args.get("num_layers") or 0
    decoder = args.get("decoder_num_layers")
    return {
        "model_family": "t5",
        "num_layers": encoder,
        "decoder_num_layers": 0 if decoder in {None, encoder} else decoder,
        "swiglu": False,
        "t5_feed_forward": "gated-silu" if args.get("swiglu") else "gelu",
        "t5_scaled_attention": True,
        "t5_scaled_head": False,
        "t5_head_bias": "head.bias" in sizes,
        "relative_attention_num_buckets": args.get("relative_attention_num_buckets") or 32,
        "relative_attention_max_distance": args.get("relative_attention_max_distance") or 128,
    }


def _arguments(shape: ModelShape) -> dict[str, Any]:
    own = shape.own
    return {
        "decoder_num_layers": decoder_layers(shape),
        "decoder_seq_length": shape.max_position_embeddings,
        "swiglu": gated(shape),
        "relative_attention_num_buckets": own["relative_attention_num_buckets"],
        "relative_attention_max_distance": own["relative_attention_max_distance"],
    }


def _flags(shape: ModelShape) -> list[str]:
    return [f"--decoder-num-layers {decoder_layers(shape)}"]


def _differences(shape: ModelShape, style: str) -> list[str]:
    own, legacy = shape.own, style == "legacy"
    biased = bool(own["t5_head_bias"])
    found = {
        f"the feed-forward layer `{own['t5_feed_forward']}`": (
            own["t5_feed_forward"] not in {"gelu", "gated-silu"}
        ),
        "attention whose scores are not divided": not own["t5_scaled_attention"],
        "hidden states that are divided before the head": own["t5_scaled_head"],
        "no bias in the head": shape.tied and not biased,
        "a head that is not tied and has a bias": not shape.tied and biased,
        "fewer heads of keys and values than of queries": (
            shape.num_query_groups != shape.num_attention_heads
        ),
        "relative positions, which `--megatron-names core` has": (
            legacy and shape.relative_positions
        ),
        "no positions": not (shape.learned_positions or shape.relative_positions),
    }
    return [what for what, there in found.items() if there]


NAMES = MegatronNames(
    core={
        "token_embedding": "embedding.word_embeddings",
        "position_embedding": "embedding.position_embeddings",
        "encoder_bias": "encoder_relative_pos_emb.relative_attention_bias",
        "decoder_bias": "decoder_relative_pos_emb.relative_attention_bias",
        "encoder_norm": "encoder.final_layernorm",
        "decoder_norm": "decoder.final_layernorm",
        "output_embedding": "lm_head.output_layer",
        "head.bias": "lm_head.output_layer.bias",
    },
    legacy={
        "token_embedding": "language_model.embedding.word_embeddings",
        "position_embedding": "language_model.embedding.position_embeddings",
        "encoder_norm": "language_model.encoder.final_norm",
        "decoder_norm": "language_model.decoder.final_norm",
        "output_embedding": "language_model.output_layer",
        "head.bias": "lm_head.bias",
    },
    older={
        "encoder.final_layernorm": "encoder_norm",
        "decoder.final_layernorm": "decoder_norm",
        "position_embeddings": "position_embedding",
        "output_layer.bias": "head.bias",
    },
    stacks={
        "encoder": Stack("encoder", norm="encoder_norm"),
        "decoder": Stack("decoder", "language_model.decoder", norm="decoder_norm", crossed=True),
    },
    aliases={
        "embedding.position_embeddings": "position_embeddings",
        "lm_head.output_layer": "output_layer",
    },
    states=("lm_head.output_layer", "output_layer"),
    matches=_matches,
    values=_values,
    arguments=_arguments,
    flags=_flags,
    differences=_differences,
)
